"""The spatial dims of pooling, padding and resampling operators: the last ones, as many as the operator's name says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from spmd.core.placement import Shard
from spmd.ir.call import Call
from spmd.rules.nested import Along
from spmd.rules.notation import Rows
from spmd.rules.ops.one_dim import cropped, not_empty
from spmd.rules.rule import Row


def space(call: Call) -> int:
    """The number of spatial dims: 2 for `avg_pool2d_backward`."""
    return int(re.findall(r"(\d)d", call.op.overloadpacket.__name__)[-1])


def over_space(offers: Callable[[Call, int], bool], run: Callable[..., Any]) -> Rows:
    """The strategies that shard one spatial dim of all operands and results.

    Args:
        offers: whether there is one for a dim of a call.
        run: the local implementation, as in `Along`.
    """

    def rows(call: Call) -> Iterator[Row]:
        ndim = call.operands[0].ndim
        for dim in range(ndim - space(call), ndim):
            if offers(call, dim):
                yield Row((Shard(dim),) * len(call.operands), (Shard(dim),) * len(call.results), Along(dim, run))

    return rows


def position(call: Call, name: str) -> int | None:
    """The position of the operator's argument `name`; None if it has none."""
    names = [argument.name for argument in call.op._schema.arguments]
    return names.index(name) if name in names else None


def replaced(call: Call, args: Sequence[Any], name: str, entries: dict[int, int]) -> tuple[Any, ...]:
    """The arguments with entries, counted from the last one, replaced in the list argument `name`, if they have it.

    A list of one entry stands for all spatial dims.
    """
    place = position(call, name)
    if place is None or place >= len(args):
        return tuple(args)
    listed = list(args[place]) * (space(call) if len(args[place]) == 1 else 1)
    for number, value in entries.items():
        listed[number] = value
    return (*args[:place], listed, *args[place + 1 :])


def least(call: Call, x: Tensor, dim: int) -> Tensor:
    """`x` with empty dims among batch, channels and `dim` (none if negative) padded to length 1."""
    return not_empty(x, dict.fromkeys((*range(x.ndim - space(call)), dim), 1))


def cropped_like(call: Call, x: Tensor, like: Tensor, dim: int, rows: int) -> Tensor:
    """`x` with the batch and channels of `like` and `rows` rows along `dim`."""
    return cropped(x, {i: like.shape[i] for i in range(x.ndim - space(call))} | {dim: rows})
