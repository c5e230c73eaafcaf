"""Proximal policy optimization with torch.distributions, in the function and outside."""

import torch
from torch.distributions import Categorical, Independent, Normal, kl_divergence

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
torch.manual_seed(0)
params = {
    "policy": torch.randn(4, 3) * 0.1,
    "mean": torch.zeros(4, 2),
    "scale": torch.zeros(2),
    "value": torch.zeros(4),
}


def policies(params, states):
    moves = Independent(Normal(states @ params["mean"], params["scale"].exp().expand(len(states), 2)), 1)
    return Categorical(logits=states @ params["policy"]), moves


@spmd.jit((P(), *(P("data"),) * 5), P(), mesh=mesh)
def improve(params, states, actions, moves, old, returns):
    def loss_of(params):
        choice, move = policies(params, states)
        log_prob = choice.log_prob(actions) + move.log_prob(moves)
        values = states @ params["value"]
        advantages = (returns - values).detach()
        ratio = (log_prob - old).exp()
        policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        prior = Normal(torch.zeros(2), torch.ones(2))
        kl = kl_divergence(Normal(states @ params["mean"], params["scale"].exp()), prior).mean()
        return policy + (returns - values).square().mean() - 0.01 * choice.entropy().mean() + 0.001 * kl

    grads, loss = torch.func.grad_and_value(loss_of)(params)
    return {name: value - 0.05 * grads[name] for name, value in params.items()}, loss


@spmd.jit((P(), P("data")), P("data"), mesh=mesh)
def act(params, states):
    choice, move = policies(params, states)
    actions, moves = choice.sample(), move.sample()
    return actions, moves, choice.log_prob(actions) + move.log_prob(moves)


results = []
for _ in range(10):
    states = torch.randn(9, 4)
    actions, moves, old = act(params, states)
    returns = states[:, 0].contiguous()
    params, loss = improve(params, states, actions, moves, old, returns)
    results.append(loss)
