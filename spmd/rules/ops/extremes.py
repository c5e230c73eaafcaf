"""Positions of the largest and smallest elements, also over a sharded dim.

One element of a line takes two all-reduces of one value; the k largest are found among the k largest of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from spmd.collectives import pmax, pmin, shard_offset
from spmd.core.placement import Replicate, Shard, neutral_element
from spmd.ir.call import Call
from spmd.rules.builders import along, argument_dims, reduction
from spmd.rules.ops.merges import Join, merged_by_all, merged_by_line
from spmd.rules.ops.one_dim import padded, resized
from spmd.rules.rule import Axes, Row, Rule, table

aten = torch.ops.aten

Kind = Literal["max", "min"]


@attrs.frozen
class _Extreme:
    """A local implementation that finds extremes over all ranks, for an operand whose dim `cut` is sharded.

    Positions are global indices along `dim`; if `dim` is None, row-major indices into the whole tensor.
    """

    kind: Kind
    cut: int
    with_values: bool

    def __call__(self, axes: Axes, call: Call, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        whole = call.operands[0].shape
        start = shard_offset(whole[self.cut], axes)
        if dim is None:
            inner = math.prod(whole[self.cut + 1 :])
            values, index = self._local(x.flatten(), 0)
            outer = index.div(max(x.shape[self.cut] * inner, 1), rounding_mode="floor")
            place = index + (outer * (whole[self.cut] - x.shape[self.cut]) + start) * inner
            best, first = self._merged(axes, values, place, math.prod(whole))
            best, first = (found.view([1] * x.ndim) for found in (best, first))
            dims = tuple(range(x.ndim))
        else:
            values, index = self._local(x, dim)
            best, first = self._merged(axes, values, index + start, whole[self.cut])
            dims = (dim,)
        best, first = (found if keepdim else found.squeeze(dims) for found in (best, first))
        return (best, first) if self.with_values else first

    def _local(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """The extremes of a shard along `dim`, which stays with length 1, and their first indices."""
        if not x.shape[dim]:  # a rank with an empty shard takes part in the collectives, with what is never found
            x = x.new_full(resized(x.shape, dim % x.ndim, 1), neutral_element(self.kind, x.dtype))
        values, index = x.max(dim, True) if self.kind == "max" else x.min(dim, True)
        return values, index

    def _merged(self, axes: Axes, values: Tensor, place: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """The extremes of all ranks and their first positions, less than `end`, from those of each rank.

        As in torch, nan wins over every number.
        """
        missing, neutral = values != values, neutral_element(self.kind, values.dtype)
        numbers = torch.where(missing, torch.full_like(values, neutral), values)
        best = pmax(numbers, axes) if self.kind == "max" else pmin(numbers, axes)
        found = torch.where(values == best, place + end, torch.full_like(place, 2 * end))
        first = pmin(torch.where(missing, place, found), axes)
        if values.is_floating_point():
            best = torch.where(first < end, torch.full_like(best, math.nan), best)
        return best, first % end


def _searched(kind: Kind, with_values: bool) -> Rule:
    """The rule of a search for extremes, with strategies that shard a searched dim."""

    def rows(call: Call) -> Iterator[Row]:
        (operand,) = call.operands
        for dim in argument_dims(call, "dim", operand.ndim):
            yield Row((Shard(dim),), (Replicate(),) * len(call.results), _Extreme(kind, dim, with_values))

    return reduction(None, rows)


def _leading(axes: Axes, call: Call, join: Join, x: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the first elements of each rank's shard, in the order of their values."""
    whole, count, largest = call.operands[0], int(call.argument("k")), call.op is aten.topk.default
    dim, size = call.argument("dim") % whole.ndim, whole.shape[call.argument("dim")]
    largest = largest and bool(call.argument("largest"))
    held = min(count, x.shape[dim])
    values, places = aten.topk.default(x, held, dim, largest)
    places = padded(places + shard_offset(size, axes), dim, 0, count - held, size)
    values = padded(values, dim, 0, count - held)
    values, places = join(values, dim), join(places, dim)
    order = values.argsort(stable=True, dim=dim, descending=largest)
    # What fills up a short shard stands last, whatever its value.
    order = order.gather(dim, (places.gather(dim, order) == size).to(torch.int8).argsort(stable=True, dim=dim))
    chosen = order.narrow(dim, 0, count)
    if call.op is aten.kthvalue.default:
        chosen = order.narrow(dim, count - 1, 1)
    values, places = values.gather(dim, chosen), places.gather(dim, chosen)
    shape = call.results[0].shape
    return values.reshape(shape), places.reshape(shape)


EXTREMES = table({
    "max.dim": _searched("max", with_values=True),
    "min.dim": _searched("min", with_values=True),
    "argmax": _searched("max", with_values=False),
    "argmin": _searched("min", with_values=False),
    "topk kthvalue": along(merged_by_all(_leading), merged_by_line(_leading)),
})  # fmt: skip
