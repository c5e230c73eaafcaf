"""A scaler of gradients in float16 round a jitted loss of a plain module."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
loss_fn = spmd.jit(
    lambda model, x, y: torch.nn.functional.mse_loss(model(x), y), (P(), P("data"), P("data")), P(), mesh=mesh
)
results = []
for number in range(8):
    optimizer.zero_grad()
    x = torch.randn(8, 6) * (torch.inf if number == 4 else 1.0)
    loss = loss_fn(model, x, torch.randn(8, 3))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    results += [torch.tensor(scaler.get_scale()), model.weight.detach().clone()]
