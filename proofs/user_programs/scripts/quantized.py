"""Quantization-aware training: torch's observers write their ranges while the model trains."""

import warnings

import torch

import spmd
from spmd import P

warnings.filterwarnings("ignore", category=DeprecationWarning)
from torch.ao import quantization  # noqa: E402

mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
torch.manual_seed(0)
torch.set_default_dtype(torch.float32)  # the kernels of torch's observers know no other
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
quantization.prepare_qat(model, inplace=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def loss_of(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)


loss_fn = spmd.jit(loss_of, (P(), P("data"), P("data")), P(), mesh=mesh)
results = []
for _ in range(6):
    optimizer.zero_grad()
    loss = loss_fn(model, torch.randn(6, 6), torch.randn(6, 3))
    loss.backward()
    optimizer.step()
    results.append(loss.detach())
results.append(model[0].weight_fake_quant.scale.clone())
