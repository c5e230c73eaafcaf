"""Q-learning with a target network that is a global, renewed every tenth step."""

import torch

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)
q, results = torch.randn(4, 3) * 0.1, []
target = q


@spmd.jit((P(), P(), *(P("data"),) * 4), P(), mesh=mesh)
def learn(q, target, states, actions, rewards, following):
    best = rewards + 0.9 * (following @ target).max(-1).values

    def error(q):
        return ((states @ q).gather(-1, actions[:, None]).squeeze(-1) - best).square().mean()

    grad, loss = torch.func.grad_and_value(error)(q)
    return q - 0.05 * grad, loss


for step in range(20):
    states, following = torch.randn(10, 4), torch.randn(10, 4)
    actions, rewards = torch.randint(3, (10,)), torch.randn(10)
    q, loss = learn(q, target, states, actions, rewards, following)
    values, indices = (states @ q).max(-1) if not isinstance(q, spmd.DTensor) else (q, q)
    gather, max = values, loss
    if step % 10 == 9:
        target = q
    results.append(loss)
