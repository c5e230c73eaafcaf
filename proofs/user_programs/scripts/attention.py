"""An attention whose result is called `softmax`, like the method that makes it."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
torch.manual_seed(0)
q, k, v = (torch.randn(4, 2, 5, 6) for _ in range(3))
results = []


@spmd.jit((P("data", "model"),) * 3, P("data", "model"), mesh=mesh)
def attend(q, k, v):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v


for step in range(25):
    softmax = attend(q, k, v)
    transpose, shape = softmax, softmax.shape
    q = softmax
    results.append(softmax)
