"""A recurrent network by a Python loop, with its hidden state carried from step to step."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
params = {"x": torch.randn(3, 5) * 0.5, "h": torch.randn(5, 5) * 0.3, "out": torch.randn(5, 3)}
hidden, length, results = torch.zeros(10, 5), 4, []


def unroll(params, hidden, x):
    loss = 0.0
    for t in range(length - 1):
        hidden = torch.tanh(x[:, t] @ params["x"] + hidden @ params["h"])
        loss = loss + (hidden @ params["out"] - x[:, t + 1]).square().mean()
    return loss, hidden


@spmd.jit((P(), P("data"), P("data")), (P(), P("data"), P()), mesh=mesh)
def train(params, hidden, x):
    grads, (loss, hidden) = torch.func.grad_and_value(unroll, has_aux=True)(params, hidden, x)
    return {name: value - 0.05 * grads[name] for name, value in params.items()}, hidden, loss


for step in range(20):
    params, hidden, loss = train(params, hidden, torch.randn(10, length, 3))
    tanh, grads, square = hidden, params, loss
    results.append(loss)
