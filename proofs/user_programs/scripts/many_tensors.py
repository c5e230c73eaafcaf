"""Eighty closed-over tensors in a dict, of which the last is replaced once and written to once."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
tensors, results = {f"t{number}": torch.full((3,), float(number)) for number in range(80)}, []


@spmd.jit(P("data"), mesh=mesh)
def total(x):
    return x.sum() + sum(tensor.sum() for tensor in tensors.values())


for step in range(24):
    results.append(total(torch.randn(10)))
    if step == 8:
        tensors["t79"] = torch.zeros(3)
    if step == 16:
        tensors["t79"].fill_(7.0)
