"""A configuration that collects statistics beside what the function reads of it, which changes once."""

import types

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
cfg, results = types.SimpleNamespace(scale=2.0, mean=None, steps=0), []


@spmd.jit(P("data"), mesh=mesh)
def f(x):
    return x.mean() * cfg.scale


for step in range(25):
    cfg.mean = f(torch.randn(10, 3))
    cfg.steps += 1
    if step == 12:
        cfg.scale = 3.0
    results.append(cfg.mean)
cfg.scale = 2.0
