"""A named tuple whose fields are unpacked to globals of the same names after each step."""

import collections

import torch

import spmd

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
State = collections.namedtuple("State", "params momentum")
state, results = State({"w": torch.randn(6, 2)}, {"w": torch.zeros(6, 2)}), []


def loss_of(params, x):
    return (x @ params["w"]).square().mean()


@spmd.jit(mesh=mesh)
def train_step(state, x):
    grads, loss = torch.func.grad_and_value(loss_of)(state.params, x)
    momentum = {name: 0.9 * old + grads[name] for name, old in state.momentum.items()}
    params = {name: old - 0.1 * momentum[name] for name, old in state.params.items()}
    return State(params, momentum), loss


for step in range(25):
    state, loss = train_step(state, torch.randn(10, 6))
    params, momentum = state
    grads = params["w"]
    results.append(loss)
