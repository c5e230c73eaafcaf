"""Mutants of resharding: the data that each step of a reshard moves, and which steps there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from proofs.fuzz.mutants.mutant import Change, Patch, mutant, replaced, returning, with_entry
from spmd.collectives.primitives import ALL_GATHER, ALL_TO_ALL, COLLECTIVES
from spmd.collectives.step import Step
from spmd.collectives.transport.group import Group
from spmd.core.spec import TensorMeta

_MOVES, _LOCAL = "spmd.collectives.moves", "spmd.collectives.local"


def _local(name: str, kernel: Callable[..., Callable[..., Tensor]]) -> Patch:
    """A patch of the primitive of a name, which does not communicate."""
    return with_entry(_LOCAL, "LOCALS", getattr(torch.ops.spmd, name).default, kernel)


def _kernel(name: str, change: Change) -> Patch:
    """A patch of the collective of a name that changes its results on the ranks of a group."""
    return returning(COLLECTIVES[getattr(torch.ops.spmd, name).default], "run", change)


def _turned(results: list[Tensor]) -> list[Tensor]:
    """Give each rank the result of the next rank, if it has the right shape."""
    turned = results[1:] + results[:1]
    return [new if new.shape == old.shape else old for new, old in zip(turned, results, strict=True)]


def _reversed_gather(group: Group, calls: Sequence[Any]) -> list[Tensor]:
    return [torch.cat([call[0] for call in reversed(calls)], calls[0][1])] * len(calls)


def _balanced(length: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Chunks whose lengths differ by at most one, as those of `torch.tensor_split` do."""
    count = math.prod(sizes)
    cuts = [length * number // count for number in range(count + 1)]
    return tuple(itertools.pairwise(cuts))


def _without_last(reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda op, tensors: reduce(op, tensors[: max(1, len(tensors) - 1)])


def _next_chunk(group: Group, index: int, operand: TensorMeta, dim: int, size: int) -> Callable[..., Tensor]:
    bounds = group.bounds(operand.shape[dim])
    start, stop = bounds[(index + 1) % group.size]
    start = start if stop - start == size else bounds[index][0]
    return lambda x: x.narrow(dim, start, size).contiguous()


def _split_first(arguments: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Swap the dims that an all_to_all splits and joins."""

    def change(step: Step, coordinate: tuple[int, ...]) -> tuple[Any, ...]:
        found = arguments(step, coordinate)
        if step.primitive is not ALL_TO_ALL:
            return found
        split, concat, split_size, concat_size, axes = found
        return concat, split, concat_size, split_size, axes

    return change


MUTANTS = (
    mutant(
        "all_gather: order",
        "shards are joined in the reverse order of the ranks",
        replaced(ALL_GATHER, "run", _reversed_gather),
        within="all_gather",
    ),
    mutant(
        "all_reduce: last rank",
        "the last rank's part is missing in a reduction",
        Patch("spmd.collectives.primitives.on_all_ranks", "_reduce", _without_last),
        within="all_reduce reduce_scatter",
    ),
    mutant(
        "all_reduce: one rank",
        "only the first rank gets the result of a reduction",
        _kernel("all_reduce", lambda results: [results[0], *(torch.zeros_like(x) for x in results[1:])]),
        within="all_reduce",
    ),
    mutant(
        "reduce_scatter: chunk",
        "a rank gets the next rank's chunk",
        _kernel("reduce_scatter", _turned),
        within="reduce_scatter",
    ),
    mutant(
        "all_to_all: chunk", "a rank gets the next rank's chunk", _kernel("all_to_all", _turned), within="all_to_all"
    ),
    mutant(
        "all_to_all: dims",
        "the split and the joined dim are exchanged",
        Patch(Step, "arguments", _split_first),
        within="all_to_all",
    ),
    mutant("permute: rank", "a rank gets what the next one should", _kernel("permute", _turned), within="permute"),
    mutant(
        "shard: chunk",
        "every rank takes the first chunk",
        _local("shard", lambda group, index, operand, dim, size: lambda x: x.narrow(dim, 0, size)),
    ),
    mutant("shard: next", "every rank takes the next rank's chunk", _local("shard", _next_chunk)),
    mutant(
        "to_partial: replicas",
        "every rank holds the value of which only the first should",
        _local("to_partial", lambda group, index, operand, op: lambda x: x),
        within="spmd.redistribute.default",
    ),
    mutant(
        "to_partial: neutral",
        "the other ranks of a maximum or a minimum hold zeros",
        replaced("spmd.collectives.primitives.without_communication", "neutral_element", lambda op, dtype: 0),
        within="aten.amax.default aten.amin.default aten.max.default aten.min.default spmd.redistribute.default",
    ),
    mutant(
        "shard_offset: even",
        "every shard begins where equal chunks would",
        _local("shard_offset", lambda group, index, size: lambda: torch.tensor(size * index // group.size)),
    ),
    mutant(
        "axis_index: reversed",
        "ranks are numbered from the last",
        _local("axis_index", lambda group, index: lambda: torch.tensor(group.size - 1 - index)),
        within="aten.cumsum.default aten.cumprod.default aten.logcumsumexp.default",
    ),
    mutant(
        "chunks: balanced",
        "uneven chunks differ by one row at most",
        replaced("spmd.collectives.transport.group", "_bounds", _balanced),
    ),
    mutant(
        "reductions: kind",
        "every pending reduction is a sum",
        Patch(_MOVES, "_reductions", lambda find: lambda *args: (attrs.evolve(step, op="sum") for step in find(*args))),
    ),
)
