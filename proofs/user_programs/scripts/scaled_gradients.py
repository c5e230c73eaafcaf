"""A gradient scaler of torch that the function asks for its scale."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
weight, results = spmd.distribute(torch.ones(5), P(), mesh), []


@spmd.jit((P(), P("data")), P(), mesh=mesh)
def scaled(weight, x):
    scale = scaler.get_scale()
    return torch.func.grad(lambda w: scale * (x @ w).square().mean())(weight), scale * x.sum()


for step in range(24):
    grad, total = scaled(weight, torch.randn(10, 5))
    weight = weight - 0.1 * grad / scaler.get_scale()
    if step == 12:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    results += [grad, total]
