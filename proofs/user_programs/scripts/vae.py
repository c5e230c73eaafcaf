"""A variational autoencoder with globals called `mean`, `std` and `noise`."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
params, results = {"mean": torch.randn(5, 2), "std": torch.randn(5, 2) * 0.1, "decode": torch.randn(2, 5)}, []


def elbo(params, x, noise):
    mean, log_std = x @ params["mean"], x @ params["std"]
    decoded = (mean + log_std.exp() * noise) @ params["decode"]
    divergence = 0.5 * (mean.square() + (2 * log_std).exp() - 1).sum(-1).mean() - log_std.sum(-1).mean()
    return (decoded - x).square().sum(-1).mean() + divergence


@spmd.jit((P(), P("data"), P("data")), P(), mesh=mesh)
def train(params, x, noise):
    grads, loss = torch.func.grad_and_value(elbo)(params, x, noise)
    return {name: value - 0.005 * grads[name] for name, value in params.items()}, loss


for step in range(20):
    x, noise = torch.randn(10, 5), torch.randn(10, 2)
    params, loss = train(params, x, noise)
    mean, std, exp, sum = params["mean"], params["std"], loss, x
    results.append(loss)
