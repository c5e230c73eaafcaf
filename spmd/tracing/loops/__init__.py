"""Loops and branches in a trace, over flat lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spmd.errors import TraceError


def traced_scan(
    body: Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]],
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    length: int,
    reverse: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """The last carry and the stacked results of a loop of known length, which is unrolled."""
    carry, results = list(init), []
    if not length:
        _, ys = body(carry, [x.new_zeros(x.shape[1:]) for x in xs])
        return carry, [y.new_empty((0, *y.shape)) for y in ys]
    for trip in reversed(range(length)) if reverse else range(length):
        carry, ys = body(carry, [x[trip] for x in xs])
        results.append(ys)
    return carry, [torch.stack(each) for each in zip(*(reversed(results) if reverse else results), strict=True)]


def traced_while(
    condition: Callable[[list[Tensor]], Tensor], body: Callable[[list[Tensor]], list[Tensor]], init: Sequence[Tensor]
) -> list[Tensor]:
    """The last carry of a loop that ends when a condition on its carry is false."""
    raise TraceError("not yet")


def traced_cond(
    predicate: Tensor, on_true: Callable[[], list[Tensor]], on_false: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """The results of the function that a predicate selects."""
    raise TraceError("not yet")
