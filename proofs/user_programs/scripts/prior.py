"""A closed-over distribution whose location is moved once."""

import torch
from torch.distributions import Normal

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
prior, results = Normal(torch.zeros(3), torch.ones(3)), []


@spmd.jit(P("data"), mesh=mesh)
def log_density(x):
    return (-(x - prior.loc).square() / (2 * prior.scale.square())).sum(-1)


for step in range(24):
    log_prob = log_density(torch.randn(10, 3))
    mean, loc, scale = log_prob.mean(), log_prob, log_prob
    if step == 12:
        prior.loc = torch.ones(3)
    results.append(log_prob)
