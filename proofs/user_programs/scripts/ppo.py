"""Proximal policy optimization: globals are called as everyone calls them."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
params = {"policy": torch.randn(4, 3) * 0.1, "value": torch.zeros(4)}
clip, results = 0.2, []


def ppo_loss(params, states, actions, old, advantages, returns):
    log_probs = (states @ params["policy"]).log_softmax(-1)
    chosen = log_probs.gather(-1, actions[:, None]).squeeze(-1)
    ratio = (chosen - old).exp()
    policy = -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return policy + 0.5 * (states @ params["value"] - returns).square().mean() - 0.01 * entropy


@spmd.jit((P(), P("data")), P("data"), mesh=mesh)
def act(params, states):
    log_probs = (states @ params["policy"]).log_softmax(-1)
    return log_probs.max(-1).values, log_probs.argmax(-1), states @ params["value"]


@spmd.jit((P(), *(P("data"),) * 5), P(), mesh=mesh)
def improve(params, *batch):
    grads, loss = torch.func.grad_and_value(ppo_loss)(params, *batch)
    return {name: value - 0.05 * grads[name] for name, value in params.items()}, loss


for step in range(20):
    states = torch.randn(10, 4)
    old, actions, values = act(params, states)
    rewards = states[:, 0]
    returns = rewards + 0.9 * rewards.mean()
    advantages = returns - returns.mean()
    mean, std, exp, sum = returns.mean(), returns.std(), old, advantages
    for epoch in range(2):
        params, loss = improve(params, states, actions, old, advantages, returns)
        results.append(loss)
