"""A variable of the environment that changes once."""

import os

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
results = []
os.environ["USER_SCALE"] = "2.0"


@spmd.jit(P("data"), mesh=mesh)
def scaled(x):
    return x * float(os.environ["USER_SCALE"]) + len(os.environ.get("USER_TEXT", ""))


for step in range(24):
    results.append(scaled(torch.ones(10)))
    os.environ["USER_UNREAD"] = str(step)
    if step == 12:
        os.environ["USER_SCALE"] = "3.0"
