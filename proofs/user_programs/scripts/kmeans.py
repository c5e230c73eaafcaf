"""Lloyd's algorithm, whose globals are called like methods of tensors."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
points, results = torch.randn(30, 2), []
centers = points[:3].clone()


@spmd.jit((P("data"), P()), P(), mesh=mesh)
def lloyd(points, centers):
    distances = (points[:, None] - centers).square().sum(-1)
    nearest = torch.nn.functional.one_hot(distances.min(-1).indices, 3).to(points.dtype)
    return nearest.T @ points / nearest.sum(0)[:, None].clamp(min=1), distances.min(-1).values.sum()


for step in range(20):
    centers, loss = lloyd(points, centers)
    sum, min, indices, values = loss, loss, centers, centers
    results += [centers, loss]
