"""Langevin dynamics of chains that are sharded, with noise drawn in the function."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
chains, results = torch.randn(10, 3), []


def log_density(x):
    return -0.5 * x.square().sum() - 0.1 * x.pow(4).sum()


@spmd.jit(P("data"), P("data"), mesh=mesh)
def move(chains):
    drift = torch.func.grad(log_density)(chains)
    return chains + 0.05 * drift + 0.1**0.5 * torch.randn(chains.shape)


for step in range(25):
    chains = move(chains)
    shape, pow, randn = chains.shape, chains, chains
    results.append(chains)
