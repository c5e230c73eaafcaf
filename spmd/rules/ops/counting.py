"""Searching in sorted values and counting in bins: the counts in the ranks' shards are partial sums."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.ir.call import Call
from spmd.rules.builders import replicated_only
from spmd.rules.notation import by_call, factors, operand_names
from spmd.rules.partial import carry, linear
from spmd.rules.rule import Row, Rule, table

aten = torch.ops.aten


def _search(call: Call) -> Rule:
    """A position in sorted values is the number of values before it: a sum over the shards, which are sorted too.

    (Values with a nan are not sorted: the result of a binary search then depends on where it begins.)
    """
    line = call.operands[0].ndim == 1
    if call.argument("sorter") is not None:
        return factors("_, ..., _ -> ..." if line else "... _, ... v, ... _ -> ... v")
    return factors("s, ... -> ..." if line else "... s, ... v -> ... v", sum="s")


def _bins_are_given(call: Call) -> bool:
    """Whether the bins do not depend on the values, and counts are not normalized to a density."""
    if call.op is aten.histc.default:
        return bool(call.argument("min") != call.argument("max"))
    given = call.op is aten.histogram.bins_tensor or call.argument("range") is not None
    return given and not call.argument("density")


def _binned(call: Call) -> Iterator[Row]:
    """Each rank counts the elements of its shard; the counts are partial sums."""
    if _bins_are_given(call):
        for dim in range(call.operands[0].ndim):
            placed: list[Placement] = [Replicate() if name == "bins" else Shard(dim) for name in operand_names(call)]
            yield Row(tuple(placed), (Partial("sum"), *(Replicate() for _ in call.results[1:])))


# Of the last operators, any result element may depend on all operand elements: they run replicated.
COUNTING = table({
    "searchsorted.Tensor": by_call(_search),
    "bucketize.Tensor": factors("..., s -> ...", sum="s"),
    "searchsorted.Scalar bucketize.Scalar": factors("s -> ", sum="s"),
    "histc histogram.bins_tensor histogram.bin_ct": replicated_only(_binned, linear("weight:0")),
    "masked_scatter": replicated_only(carry("self source")),
    "masked_scatter_backward": replicated_only(carry("grad_output")),
    "_histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors": replicated_only(),
    "nonzero_static segment_reduce _segment_reduce_backward repeat_interleave.Tensor resize": replicated_only(),
})  # fmt: skip
