"""ragged_all_to_all: rows whose numbers are data, sent from each rank to each."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spmd.collectives.axis_types import AxisType
from spmd.collectives.primitive import Arguments, Collective
from spmd.collectives.primitives.all_to_all import ALL_TO_ALL
from spmd.collectives.transport.group import Group
from spmd.collectives.transport.ragged_exchange import RaggedExchange, stay
from spmd.collectives.transport.routes import Routes, exchange_rows

_V = AxisType.VARYING


def _batched(info: Any, in_dims: Any, x: Tensor, table: Tensor, *args: Any) -> tuple[Tensor, int]:
    """Rows of all elements of a batch are sent together if they go the same way, else one element after the other."""
    op = torch.ops.spmd.ragged_all_to_all
    if in_dims[1] is None:
        return op(x.movedim(in_dims[0], 1), table, *args), 1
    xs = [x] * info.batch_size if in_dims[0] is None else x.unbind(in_dims[0])
    return torch.stack([op(*pair, *args) for pair in zip(xs, table.unbind(in_dims[1]), strict=True)]), 0


def _sent(group: Group, calls: Sequence[Arguments], results: Sequence[Tensor]) -> list[int]:
    routes = Routes.read(calls[0][1], calls[0][3], group.ranks)
    rows = [arguments[0][:1].nbytes for arguments in calls]
    return [routes.sent(index) * nbytes for index, nbytes in enumerate(rows)]


def _run(group: Group, calls: Sequence[Arguments]) -> list[Tensor]:
    _, table, _, transposed, _ = calls[0]
    routes = Routes.read(table, transposed, group.ranks)
    return exchange_rows(routes, [arguments[0] for arguments in calls], [arguments[2] for arguments in calls])


RAGGED_ALL_TO_ALL = Collective(
    schema="ragged_all_to_all(Tensor x, Tensor table, int size, bool transposed, str[] axes) -> Tensor",
    shape=lambda shape, table, size, transposed, axes: (size, *shape[1:]),
    transpose=lambda g, shape, table, size, transposed, axes: torch.ops.spmd.ragged_all_to_all(
        g, table, shape[0], not transposed, axes
    ),
    vmap=_batched,
    types=lambda *args: {_V: _V},
    most_sent=lambda counts, shape, *args: math.prod(shape),
    sent=_sent,
    run=_run,
    exchange=RaggedExchange.of,
    alone=lambda member, size, transposed: functools.partial(stay, member, size, transposed),
    is_identity=lambda *args: False,
    alike=lambda table, size, transposed: transposed,
    fits=lambda shape, *args: shape[1:],
    joins=False,
    sizes_are_data=True,
    counts_as=ALL_TO_ALL,
)
"""Rows of x sent to places in a tensor of `size` rows, as `transport.routes` reads from `table`, which all ranks hold;
rows that nothing is sent to are zero. With `transposed`, every row goes the other way."""
