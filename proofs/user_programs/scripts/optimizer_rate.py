"""The learning rate of a closed-over optimizer of torch, set between calls."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.ones(5))
opt = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
results = []


@spmd.jit((P(), P("data")), P(), mesh=mesh)
def update(weight, x):
    grad = torch.func.grad(lambda w: (x @ w).square().mean())(weight)
    return weight - opt.param_groups[0]["lr"] * grad


value = weight.detach()
for step in range(24):
    value = update(value, torch.randn(10, 5))
    weight.grad = torch.ones(5)
    opt.step()  # its state changes, which the function does not read
    if step == 12:
        opt.param_groups[0]["lr"] = 0.01
    results.append(value)
