"""A global learning rate that is halved twice."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
lr, weight, results = 0.1, torch.ones(5), []


@spmd.jit((P(), P("data")), P(), mesh=mesh)
def update(weight, x):
    loss = (x @ weight).square().mean()
    grad = 2 * x.T @ (x @ weight) / len(x)
    return weight - lr * grad, loss


for step in range(24):
    if step in (8, 16):
        lr /= 2
    weight, loss = update(weight, torch.randn(10, 5))
    results.append(loss)
