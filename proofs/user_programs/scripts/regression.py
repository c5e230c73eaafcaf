"""Linear regression by globals named `loss`, `grad`, `values` and `sum`, of which some are methods, too."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
weight, results = torch.zeros(3), []
x = torch.randn(10, 3)
y = x @ torch.tensor([1.0, -2.0, 3.0])


@spmd.jit((P(), P("data"), P("data")), P(), mesh=mesh)
def step_of(weight, x, y):
    def error(weight):
        return (x @ weight - y).square().sum()

    grad, loss = torch.func.grad_and_value(error)(weight)
    return weight - 0.01 * grad, loss, grad.sort().values


for step in range(25):
    weight, loss, values = step_of(weight, x, y)
    grad, sum = values.clone(), loss.item()
    results.append(loss)
