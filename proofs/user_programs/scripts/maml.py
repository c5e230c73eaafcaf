"""Model-agnostic meta-learning: a gradient through a gradient, by vmap over tasks."""

import torch
from torch.func import grad_and_value, vmap

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
params, inner, results = {"w": torch.randn(3), "b": torch.zeros(())}, 0.1, []


def error(params, x, y):
    return (x @ params["w"] + params["b"] - y).square().mean()


def adapted(params, x, y):
    grads = torch.func.grad(error)(params, x, y)
    return {name: value - inner * grads[name] for name, value in params.items()}


@spmd.jit((P(), P("data"), P("data")), P(), mesh=mesh)
def outer(params, x, y):
    def meta(params):
        return vmap(lambda x, y: error(adapted(params, x[:3], y[:3]), x[3:], y[3:]))(x, y).mean()

    grads, loss = grad_and_value(meta)(params)
    return {name: value - 0.05 * grads[name] for name, value in params.items()}, loss


for step in range(20):
    tasks = torch.randn(6, 3)
    x = torch.randn(6, 5, 3)
    params, loss = outer(params, x, (x @ tasks[:, :, None]).squeeze(-1))
    grad, mean, squeeze = loss, loss, tasks
    results.append(loss)
