"""Newton's method for logistic regression, with globals called `grad`, `hessian` and `solve`."""

import torch
from torch.func import grad, hessian

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
x, weight, results = torch.randn(30, 3), torch.zeros(3), []
y = (x[:, 0] + 0.5 * torch.randn(30) > 0).to(x.dtype)


def likelihood(weight, x, y):
    return torch.nn.functional.binary_cross_entropy_with_logits(x @ weight, y) + 0.01 * weight.square().sum()


@spmd.jit((P(), P("data"), P("data")), P(), mesh=mesh)
def newton(weight, x, y):
    slope, curvature = grad(likelihood)(weight, x, y), hessian(likelihood)(weight, x, y)
    return weight - torch.linalg.solve(curvature, slope), slope.norm()


for step in range(20):
    weight, norm = newton(weight, x, y)
    solve, square, linalg = norm, weight, norm
    results += [weight, norm]
