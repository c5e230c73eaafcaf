"""Loops that Python runs, trip by trip: where tensors have values, and unrolled in a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from spmd.api.control_flow.place import in_program
from spmd.api.control_flow.predicates import is_batched, read
from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.tracing.trace import trace_flat

Body: TypeAlias = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]
"""One trip: from the carry and a row of each stacked operand to the next carry and a row of each stacked result."""


def scan_by_trips(
    body: Body, init: Sequence[Tensor], xs: Sequence[Tensor], length: int, reverse: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The last carry of a loop of known length, and its results, stacked along dim 0."""
    if not length:
        return list(init), _no_rows(body, init, xs)
    carry, trips = list(init), list(range(length))
    rows = [x.unbind(0) for x in xs]  # its gradient is one stack, where that of x[trip] has the size of x in every trip
    results: list[list[Tensor]] = [[] for _ in trips]
    for trip in reversed(trips) if reverse else trips:
        carry, results[trip] = body(carry, [each[trip] for each in rows])
    return carry, [torch.stack(each) for each in zip(*results, strict=True)]


def while_by_trips(
    condition: Callable[[list[Tensor]], bool | Tensor],
    body: Callable[[list[Tensor]], list[Tensor]],
    init: Sequence[Tensor],
    call: str,
) -> list[Tensor]:
    """The last carry of a loop that ends when a condition is false; for a batch, when it is false for all examples."""
    carry = list(init)
    while read(active := condition(carry), call):
        after = body(carry)
        if isinstance(active, Tensor) and is_batched(active):
            after = [x if x is old else torch.where(active, x, old) for x, old in zip(after, carry, strict=True)]
        carry = after
    return carry


def _no_rows(body: Body, init: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    """The results of no trip: a trip on tensors without values says their shapes."""
    like = next(iter((*xs, *init)), torch.empty(()))  # numbers of `init` are plain, also beside DTensors
    return [like.new_empty((0, *meta.shape), dtype=meta.dtype) for meta in _metas(body, init, xs, like.device)]


def _metas(body: Body, init: Sequence[Tensor], xs: Sequence[Tensor], device: torch.device) -> list[TensorMeta]:
    """The metas of a trip's results."""
    row = lambda: [x.new_zeros(x.shape[1:]) for x in xs]  # noqa: E731
    if in_program():
        return [TensorMeta.of(y) for y in body(list(init), row())[1]]
    operands = [TensorMeta.of(tensor) for tensor in init] + [TensorMeta(x.shape[1:], x.dtype) for x in xs]
    try:
        graph = trace_flat(lambda *given: body(list(given[: len(init)]), list(given[len(init) :]))[1], operands)
        return [value.meta for value in graph.outputs]
    except TraceError:  # as of a body that closes over a DTensor
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            return [TensorMeta.of(y) for y in body(list(init), row())[1]]
