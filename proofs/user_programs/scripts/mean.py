"""The result of a function is assigned to the name of a method that the function calls."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
results = []


@spmd.jit(P("data"), mesh=mesh)
def f(x):
    return x.mean() + x.std()


for step in range(25):
    mean = f(torch.randn(10, 3))
    std = mean * 2
    results.append(mean)
