"""Algorithms whose length is data, as one program each: solvers, sampling, clustering, generation, accumulation.

`python examples/loops.py` runs each on 8 virtual ranks beside one device, and prints what a rank sends: of a loop whose
length is data, in one trip.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

import spmd
from spmd import P


def conjugate_gradient(matrix: Tensor, b: Tensor, tolerance: float = 1e-6) -> Tensor:
    """The solution of `matrix @ x = b` for a symmetric positive definite matrix.

    Source: Hestenes and Stiefel, "Methods of Conjugate Gradients for Solving Linear Systems", 1952.
    """

    def goes_on(state: tuple[Tensor, ...]) -> Tensor:
        return state[3] > tolerance**2 * (b @ b)

    def step(state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, residual, direction, squared = state
        image = matrix @ direction
        size = squared / (direction @ image)
        residual = residual - size * image
        new = residual @ residual
        return x + size * direction, residual, residual + new / squared * direction, new

    return spmd.while_loop(goes_on, step, (torch.zeros_like(b), b, b, b @ b))[0]


class Solve(torch.autograd.Function):
    """The solution of a linear system, with the derivative of what it solves: another solution, and no trip kept."""

    @staticmethod
    def forward(matrix: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        return conjugate_gradient(matrix, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        matrix, x = ctx.saved_tensors
        b = conjugate_gradient(matrix, cotangent)
        return -torch.outer(b, x), b


def implicit_gradient(matrix: Tensor, b: Tensor) -> Tensor:
    """The gradient of the squared norm of a solution, by the matrix."""
    return torch.func.grad(lambda matrix: Solve.apply(matrix, b).square().sum())(matrix)  # type: ignore[no-untyped-call]


def integrate(x: Tensor, end: float = 2.0, tolerance: float = 1e-4) -> tuple[Tensor, Tensor]:
    """Pendulums `x = (angle, velocity)`, `[n, 2]`, at time `end`, and the number of steps of Heun's adaptive method."""

    def velocity(x: Tensor) -> Tensor:
        return torch.stack([x[:, 1], -torch.sin(x[:, 0])], 1)

    def step(state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, t, dt, steps = state
        dt = torch.minimum(dt, end - t)
        first = velocity(x)
        second = velocity(x + dt * first)
        error = (dt / 2 * (second - first)).abs().max()
        taken = error <= tolerance
        x = torch.where(taken, x + dt / 2 * (first + second), x)
        factor = (0.9 * (tolerance / error.clamp(min=1e-12)).sqrt()).clamp(0.2, 5.0)
        return x, torch.where(taken, t + dt, t), dt * factor, steps + 1

    start = x, torch.zeros(()), torch.full((), 0.1), torch.tensor(0)
    x, _, _, steps = spmd.while_loop(lambda state: state[1] < end, step, start)
    return x, steps


def metropolis(x: Tensor, steps: int = 50) -> tuple[Tensor, Tensor]:
    """Chains `[n, dims]` that sample a normal distribution, and the part of proposals that was accepted.

    Source: Metropolis et al., "Equation of State Calculations by Fast Computing Machines", 1953.
    """

    def step(x: Tensor, _: None) -> tuple[Tensor, Tensor]:
        proposed = x + torch.randn(x.shape)
        gain = (x.square() - proposed.square()).sum(1) / 2
        accepted = torch.rand(x.shape[:1]).log() < gain
        return torch.where(accepted[:, None], proposed, x), accepted.float().mean()

    x, accepted = spmd.scan(step, x, length=steps)
    return x, accepted.mean()


def k_means(points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Centers `[k, dims]` of clusters of points `[n, dims]` that no further step moves, and the number of steps.

    Source: Lloyd, "Least Squares Quantization in PCM", 1982.
    """

    def step(state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        centers, _, steps = state
        distances = (points[:, None] - centers).square().sum(2)
        nearest = torch.nn.functional.one_hot(distances.argmin(1), len(centers)).to(points.dtype)
        counts = nearest.sum(0)[:, None]
        found = torch.where(counts > 0, nearest.T @ points / counts.clamp(min=1), centers)
        return found, (found - centers).abs().max(), steps + 1

    start = centers, torch.full((), torch.inf), torch.tensor(0)
    centers, _, steps = spmd.while_loop(lambda state: state[1] > 1e-5, step, start)
    return centers, steps


def generate(table: Tensor, first: Tensor, most: int = 12) -> tuple[Tensor, Tensor]:
    """Sequences of the likeliest next tokens, until all have ended with token 0 or are full, and their length.

    Args:
        table: logits of the next token for each token, `[vocab, vocab]`.
        first: the first token of each sequence, int64 `[batch]`.
        most: the most tokens.
    """

    def step(state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens, last, place = state
        last = torch.where(last == 0, 0, table[last].argmax(1))
        return tokens.index_copy(1, place[None], last[:, None]), last, place + 1

    def goes_on(state: tuple[Tensor, ...]) -> Tensor:
        return (state[1] != 0).any() & (state[2] < most)

    tokens = torch.zeros(len(first), most, dtype=torch.int64).index_copy(
        1, torch.zeros(1, dtype=torch.int64), first[:, None]
    )
    tokens, _, length = spmd.while_loop(goes_on, step, (tokens, first, torch.tensor(1)))
    return tokens, length


def accumulated(weight: Tensor, batches: Tensor) -> Tensor:
    """The gradient of a loss over micro-batches `[count, n, d]`, one after the other; it is summed over ranks once."""

    def loss(weight: Tensor) -> Tensor:
        def add(total: Tensor, batch: Tensor) -> tuple[Tensor, None]:
            return total + torch.tanh(batch @ weight).square().mean(), None

        return spmd.scan(add, torch.zeros(()), batches)[0] / len(batches)

    return torch.func.grad(loss)(weight)


@attrs.frozen
class Case:
    """An algorithm with its arguments and their specs."""

    function: Callable[..., Any]
    arguments: tuple[Tensor, ...]
    specs: tuple[P, ...]


def cases() -> dict[str, Case]:
    """The algorithms at a small size."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    root = draw(64, 64) / 8
    matrix, b = root @ root.T + torch.eye(64), draw(64)
    centers = 4 * draw(3, 2)
    points = (centers[:, None] + draw(3, 40, 2)).reshape(-1, 2)
    first = torch.arange(16) % 11
    return {
        "conjugate gradient": Case(conjugate_gradient, (matrix, b), (P("x"), P("x"))),
        "its implicit gradient": Case(implicit_gradient, (matrix, b), (P("x"), P("x"))),
        "adaptive integration": Case(integrate, (draw(24, 2),), (P("x"),)),
        "metropolis": Case(metropolis, (draw(24, 3),), (P("x"),)),
        "k-means": Case(k_means, (points, centers + draw(3, 2) / 2), (P("x"), P())),
        "generation": Case(generate, (draw(11, 11), first), (P(), P("x"))),
        "accumulation": Case(accumulated, (draw(8, 4), draw(32, 16, 8)), (P(), P(None, "x"))),
    }


def main() -> None:
    """Print the table."""
    mesh = spmd.make_mesh({"x": 8}, runtime="virtual")
    print(f"{'':24}{'on one device':>16}{'sent':>28}{'first call':>12}")
    for name, case in cases().items():
        step = spmd.jit(case.function, case.specs, mesh=mesh)
        torch.manual_seed(0)
        wanted = torch.utils._pytree.tree_leaves(case.function(*case.arguments))
        torch.manual_seed(0)
        start = time.process_time()
        found = torch.utils._pytree.tree_leaves(step(*case.arguments))
        seconds = time.process_time() - start
        pairs = zip(found, wanted, strict=True)
        error = max(float((x.full_tensor() - y).abs().max()) for x, y in pairs)
        sent = sum(comm.bytes for comm in step.plan(*case.arguments).comms)
        print(f"{name:24}{error:>16.1e}{sent:>22,.0f} bytes{seconds:>10.2f} s")


if __name__ == "__main__":
    main()
