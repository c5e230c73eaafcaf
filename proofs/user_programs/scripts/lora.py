"""Low-rank adapters of a frozen model that the function closes over."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).requires_grad_(False)
frozen, results = {name: weight for name, weight in model.named_parameters() if "weight" in name}, []
adapters = {n.replace(".", "_"): (torch.randn(w.shape[0], 2), torch.zeros(2, w.shape[1])) for n, w in frozen.items()}


def forward(adapters, x):
    merged = {name: weight + (lambda a, b: a @ b)(*adapters[name.replace(".", "_")]) for name, weight in frozen.items()}
    return torch.func.functional_call(model, merged, (x,))


@spmd.jit((P(), P("data"), P("data")), P(), mesh=mesh)
def tune(adapters, x, y):
    def loss_of(adapters):
        return torch.nn.functional.mse_loss(forward(adapters, x), y)

    grads, loss = torch.func.grad_and_value(loss_of)(adapters)
    return {n: tuple(v - 0.1 * g for v, g in zip(adapters[n], grads[n], strict=True)) for n in adapters}, loss


for step in range(20):
    adapters, loss = tune(adapters, torch.randn(10, 6), torch.randn(10, 3))
    weight, grads, merged = adapters["0_weight"], adapters, loss
    results.append(loss)
