"""A module under jit, trained by `functional_call`, validated in `eval` mode every fifth step."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.0), torch.nn.Linear(8, 2))
params, results = {name: value.detach().clone() for name, value in model.named_parameters()}, []


def loss_of(params, x, y):
    return torch.nn.functional.cross_entropy(torch.func.functional_call(model, params, (x,)), y)


@spmd.jit((P(), P("data"), P("data")), P(), mesh=mesh)
def train(params, x, y):
    grads, loss = torch.func.grad_and_value(loss_of)(params, x, y)
    return {name: value - 0.1 * grads[name] for name, value in params.items()}, loss


@spmd.jit((P(), P("data"), P("data")), P(), mesh=mesh)
def evaluate(params, x, y):
    return loss_of(params, x, y)


for step in range(20):
    x, y = torch.randn(10, 4), torch.randint(2, (10,))
    params, loss = train(params, x, y)
    if step % 5 == 0:
        model.eval()
        loss = evaluate(params, x, y)
        model.train()
    results.append(loss)
