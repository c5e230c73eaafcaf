"""Loops that reverse mode computes again: `scan(segments=)`, and `torch.utils.checkpoint` around a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import P
from spmd.errors import TraceError

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")
SPECS = P(), P("data"), P(None, "data")
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def arguments(trips: int, rows: int = 4) -> list[Tensor]:
    shapes = (8, 8), (rows, 8), (trips, rows, 8)
    generator = torch.Generator().manual_seed(trips)
    return [0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def loss_of(segments: int | None = None, again: bool = False, drops: bool = False, **options: Any) -> Loss:
    def loss(w: Tensor, h: Tensor, xs: Tensor) -> Tensor:
        def step(h: Tensor, x: Tensor) -> Any:
            h = torch.tanh(torch.sin(x + h @ w) @ w)
            h = torch.nn.functional.dropout(h, 0.3) if drops else h
            return h, h.square().mean()

        def run(h: Tensor) -> Any:
            return spmd.scan(step, h, xs, segments=segments, **options)

        for _ in range(2):
            h, ys = checkpoint(run, h, use_reentrant=False) if again else run(h)
        return ys.sum() + h.sum()  # type: ignore[no-any-return]

    return loss


def gradient(loss: Loss) -> Any:
    return torch.func.grad_and_value(loss, (0, 1, 2))


@pytest.mark.parametrize(
    ("trips", "options"),
    [
        (7, {"segments": 3}),
        (7, {"segments": 3, "reverse": True, "unroll": 2}),
        pytest.param(6, {"segments": 2, "drops": True}, marks=pytest.mark.slow),
        pytest.param(5, {"segments": 9}, marks=pytest.mark.slow),
        pytest.param(0, {"segments": 2}, marks=pytest.mark.slow),
        pytest.param(5, {"again": True, "drops": True}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("rows", [4, pytest.param(3, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)])
def test_values_and_gradients(trips: int, options: dict[str, Any], rows: int) -> None:
    args = arguments(trips, rows)
    plain = loss_of(**{name: value for name, value in options.items() if name not in ("segments", "again")})
    torch.manual_seed(0)
    wanted = gradient(plain)(*args)
    torch.manual_seed(0)
    found = spmd.jit(gradient(loss_of(**options)), SPECS, mesh=MESH)(*args)
    torch.testing.assert_close(found[1].full_tensor(), wanted[1])
    for x, y in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(x.full_tensor(), y)


@pytest.mark.parametrize("transform", ["hessian", pytest.param("vmap of grad", marks=pytest.mark.slow), "jvp of grad"])
def test_transforms(transform: str) -> None:
    def transformed(loss: Loss) -> Any:
        first: Any = torch.func.grad(loss)
        if transform == "hessian":
            return torch.func.grad(lambda *args: first(*args).square().sum())
        if transform == "vmap of grad":
            return lambda w, h, xs: torch.vmap(first, (None, 0, None))(w, torch.stack([h, -h]), xs)
        return lambda w, h, xs: torch.func.jvp(lambda w: first(w, h, xs), (w,), (w.cos(),))[1]

    args = arguments(5)
    found = spmd.jit(transformed(loss_of(2)), SPECS, mesh=MESH)(*args)
    torch.testing.assert_close(found.full_tensor(), transformed(loss_of())(*args))


def peak(loss: Loss, trips: int) -> int:
    return spmd.jit(torch.func.grad(loss), SPECS, mesh=MESH).plan(*arguments(trips)).memory.peak


def test_memory() -> None:
    """Segments keep about as many carries as they are, and one segment's trips; a checkpointed loop keeps its ends."""
    rows = 400 * 2 * 8 * 8  # of xs, which are an argument
    plain, segmented = peak(loss_of(), 400) - rows, peak(loss_of(20), 400) - rows
    assert segmented * 5 < plain
    assert peak(loss_of(again=True), 400) - rows < 0.7 * plain


def test_mistakes() -> None:
    with pytest.raises(TraceError, match="segments must be an integer of 1 or more"):
        spmd.scan(lambda c, x: (c, x), torch.zeros(()), torch.zeros(3), segments=0)


@pytest.mark.parametrize("transform", ["jacrev", "vmap of grad"])
def test_batches_of_gradients_of_checkpointed_trips(transform: str) -> None:
    def loop(b: Tensor, xs: Tensor, call: Any) -> Any:
        def trip(carry: Any, x: Tensor) -> Any:
            return (carry[0] * carry[1].sin().sum(), carry[1].sin() + x), None

        return spmd.scan(call(trip), (torch.ones((), dtype=b.dtype), b), xs)[0]

    def function(call: Any) -> Any:
        if transform == "jacrev":
            return torch.func.jacrev(lambda b, xs: loop(b, xs, call))
        return torch.vmap(torch.func.grad(lambda b, xs: sum(x.sum() for x in loop(b, xs, call))), (0, None))

    checkpointed = lambda trip: lambda carry, x: checkpoint(trip, carry, x, use_reentrant=False)  # noqa: E731
    b, xs = torch.linspace(0.1, 0.6, 6, dtype=torch.float64), torch.linspace(1, 2, 3, dtype=torch.float64)
    b = b if transform == "jacrev" else b.reshape(3, 2)
    found = spmd.jit(function(checkpointed), mesh=MESH)(b, xs)
    torch.testing.assert_close(spmd.full_tree(found), function(lambda trip: trip)(b, xs))
