"""Dependence of a function's results on single elements of its operands, by differences at several points.

Small differences in float64 are derivatives: they exist for every operator, and are exact for the piecewise linear
ones. Large ones put another value in place of an element, that of another point or one beyond all others: they show
what depends on it where derivatives are zero, as of steps, signs and positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import attrs
import torch

Function: TypeAlias = Callable[..., Sequence[torch.Tensor]]
Point: TypeAlias = Sequence[torch.Tensor]
Key: TypeAlias = tuple[int, int]
"""An element of an operand: the operand's position, and that of the element in it."""

STEP = 1e-4
"""The distance of a small difference's points from the middle."""


@attrs.frozen(eq=False)
class Dependence:
    """The changes of the results, flat and in a row, with each element of the floating operands.

    Args:
        keys: the elements.
        slopes: at each point, the derivatives: a row for each number of the results, a column for each element. Rows
            that are not finite at a point are zero.
        changes: at each point, whether a number changes with an element.
        sizes: the bytes of each number of the results.
        is_floating: whether each number of the results is a floating one.
    """

    keys: Sequence[Key]
    slopes: Sequence[torch.Tensor]
    changes: Sequence[torch.Tensor]
    sizes: torch.Tensor
    is_floating: torch.Tensor

    @property
    def depends(self) -> torch.Tensor:
        """Test whether a number changes with an element at some point."""
        return torch.stack(list(self.changes)).any(0)


def dependence(function: Function, points: Sequence[Point]) -> Dependence:
    """Compute differences of a function, of floating operands in float64; points at which it fails are left out."""
    results = function(*points[0])
    tried = [(point, _attempt(function, point)) for point in points]
    valid = [(point, value) for point, value in tried if value is not None]
    keys = [(n, i) for n, x in enumerate(points[0]) if x.is_floating_point() for i in range(x.numel())]
    slopes, changes = [], []
    for number, (point, value) in enumerate(valid):
        other, _ = valid[(number + 1) % len(valid)]
        slope, change = _differences(function, point, other, value, keys)
        slopes.append(slope)
        changes.append(change)
    sizes = torch.cat([torch.full((r.numel(),), float(r.dtype.itemsize)) for r in results])
    is_floating = torch.cat([torch.full((r.numel(),), r.is_floating_point()) for r in results])
    return Dependence(keys, slopes, changes, sizes, is_floating)


def points_of(tensors: Point) -> Iterator[Point]:
    """Points for differences: the operands, others near them, and others of other orders, signs and magnitudes."""
    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        yield [_moved(tensor, number, generator) if tensor.is_floating_point() else tensor for tensor in tensors]


def _moved(x: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    if not number:
        return x
    y = x * (1 + 0.3 * torch.randn(x.shape, dtype=x.dtype, generator=generator))
    if number > 1:
        y = y.flatten()[torch.randperm(x.numel(), generator=generator)].reshape(x.shape)
    if number > 2:
        y = y * torch.randint(0, 2, x.shape, generator=generator).to(x.dtype).mul(2).sub(1) * (number - 2)
    return y


def _differences(
    function: Function, point: Point, other: Point, value: torch.Tensor, keys: Sequence[Key]
) -> tuple[torch.Tensor, torch.Tensor]:
    slopes, changes = [], []
    for key in keys:
        here, there = (float(p[key[0]].reshape(-1)[key[1]]) for p in (point, other))
        beyond = 2 * float(point[key[0]].abs().max()) * (1 if there > here else -1)
        above, below, *far = (
            _attempt(function, _with(point, key, x)) for x in (here + STEP, here - STEP, there, beyond)
        )
        slopes.append(torch.zeros_like(value) if above is None or below is None else (above - below) / (2 * STEP))
        changed = [(moved - value).nan_to_num(0, 0, 0) != 0 for moved in far if moved is not None]
        changes.append(torch.stack([torch.zeros(len(value), dtype=torch.bool), *changed]).any(0))
    if not keys:
        return torch.zeros(len(value), 0, dtype=torch.float64), torch.zeros(len(value), 0, dtype=torch.bool)
    slope = torch.stack(slopes, 1)
    slope = torch.where(slope.isfinite().all(1, keepdim=True), slope, 0)
    return slope, torch.stack(changes, 1) | (slope != 0)


def _with(point: Point, key: Key, value: float) -> Point:
    operands = [operand.clone() for operand in point]
    operands[key[0]].reshape(-1)[key[1]] = value
    return operands


def _attempt(function: Function, point: Point) -> torch.Tensor | None:
    """The results, flat; None where the function refuses the operands, as a factorization does."""
    try:
        results = function(*point)
    except (RuntimeError, ValueError, IndexError):
        return None
    return torch.cat([result.to(torch.float64).flatten() for result in results])
