"""Searching in sorted values and counting in bins: the counts in the ranks' shards are partial sums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spmd.collectives import pmax, pmin
from spmd.core.placement import Partial, Placement, Reduction, Replicate, Shard, neutral_element
from spmd.ir.call import Call
from spmd.rules.builders import replicated_only
from spmd.rules.notation import by_call, factors, operand_names
from spmd.rules.partial import carry, linear
from spmd.rules.rule import Axes, Row, Rule, table

aten = torch.ops.aten


def _search(call: Call) -> Rule:
    """A position in sorted values is the number of values before it: a sum over the shards, which are sorted too.

    (Values with a nan are not sorted: the result of a binary search then depends on where it begins.)
    """
    line = call.operands[0].ndim == 1
    if call.argument("sorter") is not None:
        return factors("_, ..., _ -> ..." if line else "... _, ... v, ... _ -> ... v")
    return factors("s, ... -> ..." if line else "... s, ... v -> ... v", sum="s")


_OF_ROWS = frozenset({
    aten._histogramdd_bin_edges.default, aten._histogramdd_from_bin_cts.default,
    aten._histogramdd_from_bin_tensors.default,
})  # fmt: skip
"""Operators that count points, whose coordinates are the last dim."""


def _bins_are_given(call: Call) -> bool:
    """Test for bins that do not depend on the values."""
    if call.op is aten.histc.default:
        return bool(call.argument("min") != call.argument("max"))
    return call.argument("range", None) is not None or "bins" in operand_names(call)


def _ends(axes: Axes, x: Tensor) -> Tensor:
    """The least and the greatest number of all ranks; a nan becomes infinity, which torch refuses, too."""
    numbers = torch.where(x != x, torch.full_like(x, math.inf), x) if x.is_floating_point() else x
    if x.numel():
        least, greatest = numbers.amin(), numbers.amax()
    else:
        least, greatest = (x.new_full((), neutral_element(kind, x.dtype)) for kind in _KINDS)
    return torch.stack([pmin(least, axes), pmax(greatest, axes)])


_KINDS: tuple[Reduction, Reduction] = ("min", "max")


def _count_between_ends(axes: Axes, call: Call, x: Tensor, *args: Any) -> Tensor:
    """`histc` with the ends of all ranks' values among this rank's, so that it finds the bins of one device."""
    ends = _ends(axes, x)
    return aten.histc.default(torch.cat([x.flatten(), ends]), *args) - aten.histc.default(ends, *args)  # type: ignore[no-any-return]


def _binned(call: Call) -> Iterator[Row]:
    """Each rank counts the elements of its shard; the counts are partial sums, which a density would normalize.

    Only `histc` has a kernel for meta tensors, by which a local implementation is counted.
    """
    x, is_given = call.operands[0], _bins_are_given(call)
    if call.argument("density", False) or not (is_given or (x.numel and call.op is aten.histc.default)):
        return
    counts = Replicate() if call.op is aten._histogramdd_bin_edges.default else Partial("sum")
    for dim in range(x.ndim - (call.op in _OF_ROWS)):
        placed: list[Placement] = [Replicate() if name == "bins" else Shard(dim) for name in operand_names(call)]
        results = (counts, *(Replicate() for _ in call.results[1:]))
        yield Row(tuple(placed), results, None if is_given else _count_between_ends)


# Of the last operators, any result element may depend on all operand elements: they run replicated.
COUNTING = table({
    "searchsorted.Tensor": by_call(_search),
    "bucketize.Tensor": factors("..., s -> ...", sum="s"),
    "searchsorted.Scalar bucketize.Scalar": factors("s -> ", sum="s"),
    "histc histogram.bins_tensor histogram.bin_ct": replicated_only(_binned, linear("weight:0")),
    "masked_scatter": replicated_only(carry("self source")),
    "masked_scatter_backward": replicated_only(carry("grad_output")),
    "_histogramdd_bin_edges": replicated_only(_binned),
    "_histogramdd_from_bin_cts _histogramdd_from_bin_tensors": replicated_only(_binned, linear("weight")),
    "nonzero_static segment_reduce _segment_reduce_backward repeat_interleave.Tensor resize": replicated_only(),
})  # fmt: skip
