"""Searching in sorted values and counting in bins: what the ranks count in their shards adds up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from spmd.placement import Partial, Placement, Replicate, Shard
from spmd.rules.builders import rule
from spmd.rules.notation import Rows, factors, operand_names
from spmd.rules.partial import carry
from spmd.rules.rule import Call, Factors, Row, Rule

aten = torch.ops.aten

# A position in sorted values is the number of those before it: a sum over shards, which are sorted too. (Values with a
# nan are not sorted: what a binary search finds in them depends on where it begins.)
_SEARCH = factors("... s, ... v -> ... v", sum="s")
_SEARCH_ONE = factors("s, ... -> ...", sum="s")
_SEARCH_ORDERED = factors("... _, ... v, ... _ -> ... v")
_SEARCH_ONE_ORDERED = factors("_, ..., _ -> ...")


def _search(call: Call) -> Factors:
    ordered = call.argument("sorter") is not None
    if call.operands[0].ndim == 1:
        return (_SEARCH_ONE_ORDERED if ordered else _SEARCH_ONE).factorize(call)
    return (_SEARCH_ORDERED if ordered else _SEARCH).factorize(call)


def whole(*rows: Rows) -> Rule:
    """The rule of an operator that cannot be cut, but for `rows`."""
    return rule(
        lambda call: Factors(
            tuple(((),) * meta.ndim for meta in call.operands), tuple(((),) * meta.ndim for meta in call.results), {}
        ),
        *rows,
    )


def _bins_are_given(call: Call) -> bool:
    """Whether the bins do not depend on the values, and counts are not divided by their sum."""
    if call.op is aten.histc.default:
        return bool(call.argument("min") != call.argument("max"))
    given = call.op is aten.histogram.bins_tensor or call.argument("range") is not None
    return given and not call.argument("density")


def _binned(call: Call) -> Iterator[Row]:
    """Each rank counts the elements of its shard."""
    if _bins_are_given(call):
        names = operand_names(call)
        for dim in range(call.operands[0].ndim):
            placed: list[Placement] = [Replicate() if name == "bins" else Shard(dim) for name in names]
            yield Row(tuple(placed), (Partial("sum"), *(Replicate() for _ in call.results[1:])))


_WHOLE = whole()
_BINNED = whole(_binned)

COUNTING: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.searchsorted.Tensor: rule(_search),
        aten.searchsorted.Scalar: factors("s -> ", sum="s"),
        aten.bucketize.Tensor: factors("..., s -> ...", sum="s"),
        aten.bucketize.Scalar: factors("s -> ", sum="s"),
        aten.masked_scatter.default: whole(carry("self source")),
        aten.masked_scatter_backward.default: whole(carry("grad_output")),
        aten.as_strided.default: whole(carry("self")),
        aten.as_strided_scatter.default: whole(carry("self src")),
        aten.histc.default: _BINNED,
        aten.histogram.bins_tensor: _BINNED,
        aten.histogram.bin_ct: _BINNED,
        **dict.fromkeys(
            (
                aten._histogramdd_bin_edges.default,
                aten._histogramdd_from_bin_cts.default,
                aten._histogramdd_from_bin_tensors.default,
                aten.nonzero_static.default,
                aten.segment_reduce.default,
                aten._segment_reduce_backward.default,
            ),
            _WHOLE,
        ),
    }
)
"""At the end, operators whose every element may depend on all of the operands: they run whole on every rank."""
