"""Low-rank adapters in a plain module, trained by torch's AdamW: `jit` stands where `torch.compile` stood."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
torch.manual_seed(0)


class Adapted(torch.nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


model = torch.nn.Sequential(Adapted(torch.nn.Linear(6, 8)), torch.nn.Tanh(), Adapted(torch.nn.Linear(8, 3)))
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def loss_of(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)


loss_fn = spmd.jit(loss_of, (P(), P("data"), P("data")), P(), mesh=mesh)
results = []
for _ in range(10):
    optimizer.zero_grad()
    for _ in range(2):
        loss = loss_fn(model, torch.randn(5, 6), torch.randn(5, 3))
        (loss / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    scheduler.step()
    results += [loss.detach(), norm]
results += [p.detach().clone() for p in model.parameters()]
