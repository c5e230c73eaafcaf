"""A lower bound of what ranks send, from the derivatives of a function of all shards.

What rank i must receive is at least the rank of d(its result)/d(elements that it does not hold), for a result is a
function of what is received. What rank j must send is at least the rank of d(results elsewhere)/d(elements that only j
holds). Parts of a pending sum are elements of their own. Derivatives are differences in float64 at several points: they
exist for every operator, and are exact for the piecewise linear ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import attrs
import torch

from spmd.core.shards import split
from spmd.core.spec import DTensorSpec

Function: TypeAlias = Callable[..., Sequence[torch.Tensor]]

STEP = 1e-4
"""The distance of the two points of a difference."""
_ROUNDING = 1e-6
"""Singular values below this part of the largest one count as zero."""
_ZERO = 1e-8
"""Singular values below it count as zero: differences are not more exact."""


@attrs.frozen
class LeastSent:
    """A lower bound of what ranks send, in numbers.

    Args:
        sent: by one rank, to give others what only it holds.
        received: by a rank, on average.
        merged: the numbers of replicated results that depend on what several ranks hold.
        gathered: what a rank receives, on average, where it gets all that it does not hold.
        ranks: the number of ranks.
        replicated: whether every rank has all results.
        is_known: whether a result has a derivative: of others, as of roundings, nothing is known.
    """

    sent: int
    received: float
    merged: int
    gathered: float
    ranks: int
    replicated: bool
    is_known: bool

    @property
    def numbers(self) -> float:
        """The numbers of the rank that sends most; a ring sends one that stays on all n ranks 2(n - 1)/n times."""
        least = max(self.received, self.sent)
        if not self.replicated or self.ranks == 1:
            return least
        around = 2 * (self.ranks - 1) / self.ranks
        return max(least, min(self.gathered, around * max(self.sent, self.merged)))


@attrs.frozen(eq=False)
class _Element:
    """An element of an operand, or of one rank's part of it; who holds it, and the operand with one more of it."""

    operand: int
    index: int
    holders: frozenset[int]


def least_sent(
    function: Function,
    points: Sequence[Sequence[torch.Tensor]],
    specs: Sequence[DTensorSpec],
    results: Sequence[DTensorSpec],
) -> LeastSent:
    """Bound from below what ranks send to compute a function.

    Args:
        function: the function, of floating operands in float64; others are the same at all points.
        points: the operands at each of several points.
        specs: the specs of the operands; those that are not floating must be replicated.
        results: the specs of the results, with nothing pending. A number that is no float has no derivative: it counts
            as one that depends on what every rank holds.
    """
    ranks = specs[0].mesh.size if specs else results[0].mesh.size
    elements = list(_elements(points[0], specs))
    rows = _holders(results)
    sent, received, merged, is_known = [0] * ranks, [0] * ranks, 0, False
    replicated = all(spec.is_replicated for spec in results)
    steps = [spec for spec in results if not spec.meta.dtype.is_floating_point]
    steps = steps if any(len(element.holders) < ranks for element in elements) else []
    for point in points:
        jacobian = _jacobian(function, point, elements)
        if not bool(jacobian.isfinite().all()):
            continue
        is_known = is_known or bool((jacobian != 0).any())
        for rank in range(ranks):
            lacks = [n for n, element in enumerate(elements) if rank not in element.holders]
            mine = [n for n, holders in enumerate(rows) if rank in holders]
            received[rank] = max(received[rank], _rank(jacobian[mine][:, lacks]))
            alone = [n for n, element in enumerate(elements) if element.holders == {rank}]
            others = [n for n, holders in enumerate(rows) if holders != {rank}]
            sent[rank] = max(sent[rank], _rank(jacobian[others][:, alone]))
        if replicated:
            owners = torch.tensor([min(e.holders) if len(e.holders) == 1 else -1 for e in elements])
            touched = torch.stack([(jacobian[:, owners == rank] != 0).any(1) for rank in range(ranks)]).sum(0)
            merged = max(merged, _rank(jacobian[touched > 1][:, owners >= 0]))
    received = [count + sum(_size(spec, rank) for spec in steps) for rank, count in enumerate(received)]
    merged += sum(spec.meta.numel for spec in steps) if replicated else 0
    gathered = sum(ranks - len(element.holders) for element in elements) / ranks
    return LeastSent(max(sent), sum(received) / ranks, merged, gathered, ranks, replicated, is_known or bool(steps))


def _size(spec: DTensorSpec, rank: int) -> int:
    return math.prod(spec.local_shape(spec.mesh.coordinate(rank)))


def _elements(point: Sequence[torch.Tensor], specs: Sequence[DTensorSpec]) -> Iterator[_Element]:
    """The elements that ranks hold: a pending sum has one for each rank that has a part."""
    for number, (operand, spec) in enumerate(zip(point, specs, strict=True)):
        if not operand.is_floating_point():
            continue
        places = torch.arange(operand.numel()).reshape(operand.shape)
        held: dict[int, list[int]] = {}
        for rank, shard in enumerate(split([places] * _parts(spec), spec)):
            for index in shard.flatten().tolist():
                held.setdefault(index, []).append(rank)
        for index, holders in held.items():
            for group in [[rank] for rank in holders] if spec.partial else [holders]:
                yield _Element(number, index, frozenset(group))


def _parts(spec: DTensorSpec) -> int:
    return spec.mesh.axis_size([axis for axis, _ in spec.partial]) if spec.partial else 1


def _holders(specs: Sequence[DTensorSpec]) -> list[frozenset[int]]:
    """The ranks that hold each element of the results."""
    found: list[frozenset[int]] = []
    for spec in specs:
        held: list[set[int]] = [set() for _ in range(spec.meta.numel)]
        places = torch.arange(spec.meta.numel).reshape(spec.meta.shape)
        for rank, shard in enumerate(split([places], spec)):
            for index in shard.flatten().tolist():
                held[index].add(rank)
        found += map(frozenset, held)
    return found


def _jacobian(function: Function, point: Sequence[torch.Tensor], elements: Sequence[_Element]) -> torch.Tensor:
    """Differences of all results, a row each, by elements, a column each; equal ones are computed once."""
    known: dict[tuple[int, int], torch.Tensor] = {}
    columns = []
    for element in elements:
        key = element.operand, element.index
        if key not in known:
            above, below = (_moved(function, point, key, step) for step in (STEP, -STEP))
            known[key] = (above - below) / (2 * STEP)
        columns.append(known[key])
    return torch.stack(columns, 1) if columns else torch.zeros(len(_flat(function(*point))), 0)


def _moved(function: Function, point: Sequence[torch.Tensor], key: tuple[int, int], step: float) -> torch.Tensor:
    operands = [operand.clone() for operand in point]
    operands[key[0]].reshape(-1)[key[1]] += step
    return _flat(function(*operands))


def _flat(results: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([result.to(torch.float64).flatten() for result in results])


def _rank(matrix: torch.Tensor) -> int:
    if not matrix.numel():
        return 0
    values = torch.linalg.svdvals(matrix)
    return int((values > max(_ROUNDING * float(values[0]), _ZERO)).sum())
