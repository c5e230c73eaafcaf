"""A generator and a discriminator in turns, by two jitted steps that share functions."""

import torch
import torch.nn.functional as F

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
g, d, results = {"w": torch.randn(2, 3), "b": torch.zeros(3)}, {"w": torch.randn(3), "b": torch.zeros(())}, []


def generate(g, noise):
    return torch.tanh(noise @ g["w"] + g["b"])


def judge(d, x):
    return x @ d["w"] + d["b"]


def sgd(params, grads):
    return {name: value - 0.1 * grads[name] for name, value in params.items()}


@spmd.jit((P(), P(), P("data"), P("data")), P(), mesh=mesh)
def train_d(d, g, real, noise):
    def loss_of(d):
        return F.softplus(-judge(d, real)).mean() + F.softplus(judge(d, generate(g, noise))).mean()

    grads, loss = torch.func.grad_and_value(loss_of)(d)
    return sgd(d, grads), loss


@spmd.jit((P(), P(), P("data")), P(), mesh=mesh)
def train_g(g, d, noise):
    grads, loss = torch.func.grad_and_value(lambda g: F.softplus(-judge(d, generate(g, noise))).mean())(g)
    return sgd(g, grads), loss


for step in range(20):
    real, noise = torch.randn(10, 3), torch.randn(10, 2)
    d, loss = train_d(d, g, real, noise)
    g, mean = train_g(g, d, noise)
    grads, items = g, list(d.items())
    results += [loss, mean]
