"""Lists, arrays and nested dicts of a hundred numbers, each changed once."""

import numpy as np
import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
floats, array = [1.0] * 100, np.ones(100)
tree = {"model": {"layer": {"norm": {"eps": 1.0}}}}
results = []


@spmd.jit(P("data"), mesh=mesh)
def weighted(x):
    return x * sum(floats) + float(array[99]) * tree["model"]["layer"]["norm"]["eps"]


for step in range(24):
    results.append(weighted(torch.randn(10)))
    if step == 8:
        floats[80] = 5.0
    if step == 12:
        array[99] = 3.0
    if step == 16:
        tree["model"]["layer"]["norm"]["eps"] = 2.0
