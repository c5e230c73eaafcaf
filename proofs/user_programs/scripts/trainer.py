"""A trainer whose method is jitted: it counts its steps and keeps a history beside what the method reads."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)


class Trainer:
    """Weights, a rate, and what happened."""

    def __init__(self):
        self.weight, self.rate, self.steps, self.loss, self.history = torch.ones(5), 0.1, 0, None, []

    @spmd.jit((P(), P("data")), P(), mesh=mesh)
    def update(self, weight, x):
        """One step."""
        grad, loss = torch.func.grad_and_value(lambda w: (x @ w).square().mean())(weight)
        return weight - self.rate * grad, loss

    def fit(self, x):
        """One step, with what is to be remembered of it."""
        self.weight, self.loss = self.update(self.weight, x)
        self.steps += 1
        self.history.append(self.loss)


trainer = Trainer()
for step in range(20):
    trainer.fit(torch.randn(10, 5))
    if step == 10:
        trainer.rate = 0.01
results = list(trainer.history)
