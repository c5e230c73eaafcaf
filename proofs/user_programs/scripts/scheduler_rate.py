"""The rate that a closed-over scheduler of torch says, which falls every tenth step."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(opt, 10, 0.5)
value, results = torch.ones(5), []


@spmd.jit((P(), P("data")), P(), mesh=mesh)
def update(weight, x):
    grad = torch.func.grad(lambda w: (x @ w).square().mean())(weight)
    return weight - scheduler.get_last_lr()[0] * grad


for step in range(24):
    value = update(value, torch.randn(10, 5))
    opt.step()
    scheduler.step()
    results.append(value)
