"""A contrastive loss with a temperature in a list, and a global `softmax` function of the user's."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
weight, temperature, results = torch.randn(6, 4), [0.5], []


def softmax(scores):
    return (scores - scores.logsumexp(-1, keepdim=True)).exp()


def nce(weight, x, y):
    one, other = x @ weight, y @ weight
    one, other = one / one.norm(dim=-1, keepdim=True), other / other.norm(dim=-1, keepdim=True)
    return -softmax(one @ other.T / temperature[0]).diagonal().log().mean()


@spmd.jit((P(), P("data"), P("data")), P(), mesh=mesh)
def train(weight, x, y):
    grad, loss = torch.func.grad_and_value(nce)(weight, x, y)
    return weight - 0.1 * grad, loss


for step in range(20):
    x = torch.randn(10, 6)
    weight, loss = train(weight, x, x + 0.1 * torch.randn(10, 6))
    norm, diagonal, mean = loss, weight, loss.item()
    if step == 10:
        temperature[0] = 0.1
    results.append(loss)
