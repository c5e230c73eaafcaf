"""A mixture of experts whose count of calls is kept in a global dict that the function does not read."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
torch.manual_seed(0)
params = {"router": torch.randn(6, 4), "experts": torch.randn(4, 6, 6) * 0.3}
specs, statistics, results = {"router": P(), "experts": P("model")}, {"calls": 0, "loss": []}, []


def mixture(params, x):
    weights = (x @ params["router"]).softmax(-1)
    return torch.einsum("te,ted->td", weights, torch.einsum("td,edf->tef", x, params["experts"]))


@spmd.jit((specs, P("data")), (specs, P()), mesh=mesh)
def train(params, x):
    grads, loss = torch.func.grad_and_value(lambda p: (mixture(p, x) - x.flip(-1)).square().mean())(params)
    return {name: value - 0.1 * grads[name] for name, value in params.items()}, loss


for step in range(20):
    params, loss = train(params, torch.randn(10, 6))
    softmax, einsum, weights = loss, loss, params["router"]
    statistics["calls"] += 1
    statistics["loss"].append(loss)
results += statistics["loss"]
