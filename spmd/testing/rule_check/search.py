"""The search for valid rows: the plain operator runs on shards, for all placements of the operands of small calls.

A row is valid only if it is right for other values of the operands too: for example, the maximum of numbers that happen
to be positive proves nothing about negative ones. Valid rows that others imply are left out. A call whose results are
the same for all these values is not searched, as it cannot show that a row is wrong.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from spmd.core.placement import REDUCTIONS, Partial, Placement, Replicate, Shard
from spmd.rules.rule import Rule
from spmd.rules.strategy import Strategy
from spmd.testing.rule_check.execute import FAILURES, Example, Grouping, execute, mismatch, split_placement
from spmd.testing.rule_check.values import redrawn

_DRAWS = 3
"""How many random splits of Partial operands into parts are tried, for every version of a call's values."""


@attrs.frozen
class PlacedRow:
    """The placements of operands and results, over physical dims."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]

    def implies(self, other: PlacedRow) -> bool:
        """Whether the other row follows from this one by local steps.

        A replicated operand of the other row can be given any placement locally, and so can a replicated result of this
        one.
        """
        pairs = zip(self.operands, other.operands, strict=True)
        free = all(wanted == given or given == Replicate() for wanted, given in pairs)
        given = zip(self.results, other.results, strict=True)
        return free and all(have == wanted or have == Replicate() for have, wanted in given)


def physical(strategy: Strategy, shapes: Sequence[Grouping]) -> PlacedRow | None:
    """A strategy's placements over physical dims; None if it shards a factor of a dim other than the major one."""
    placements: list[Placement] = []
    for placement, grouping in zip((*strategy.operands, *strategy.results), shapes, strict=True):
        if isinstance(placement, Shard):
            starts = list(itertools.accumulate((len(group) for group in grouping), initial=0))
            if placement.dim not in starts[:-1]:
                return None
            placement = Shard(starts.index(placement.dim))
        placements.append(placement)
    count = len(strategy.operands)
    return PlacedRow(tuple(placements[:count]), tuple(placements[count:]))


def search(example: Example, rule: Rule, sizes: Sequence[int], combinations: int) -> tuple[PlacedRow, ...]:
    """The rows for which the plain operator on shards is right, without those that others imply.

    Args:
        example: the call.
        rule: its rule, for `size_argument` and `empty`.
        sizes: the numbers of shards; a row must be right for all of them.
        combinations: the most combinations of operand placements to try; if there are more, a fixed sample is tried.
    """
    versions = [example, *redrawn(example)]
    if len(versions) > 1 and all(_agree(example.results, version.results) for version in versions[1:]):
        return ()
    found = [row for operands in _combinations(example, combinations) for row in _rows(versions, rule, operands, sizes)]
    return tuple(row for row in found if not is_implied(row, [other for other in found if other != row]))


def _agree(results: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, results, others))


def is_implied(row: PlacedRow, known: Sequence[PlacedRow]) -> bool:
    """Whether known rows imply a row: one of them alone, or several together of which all but one are only Partial.

    For example, an operand whose values make no difference may be Partial in any row.
    """
    if any(other.implies(row) for other in known):
        return True
    return any(is_implied(rest, known) for other in known if (rest := _without(row, other)) is not None)


def _without(row: PlacedRow, part: PlacedRow) -> PlacedRow | None:
    """A row with the placements of `part` made replicated; None if `part` is not a Partial-only part of the row."""
    placed = [place for place in (*part.operands, *part.results) if place != Replicate()]
    if not placed or any(isinstance(place, Shard) for place in placed):
        return None
    pairs = [*zip(row.operands, part.operands, strict=True), *zip(row.results, part.results, strict=True)]
    rest = [Replicate() if taken == given else given for given, taken in pairs]
    if any(taken not in (Replicate(), given) for given, taken in pairs) or all(p == Replicate() for p in rest):
        return None
    if part.results != (Replicate(),) * len(part.results) and any(isinstance(place, Shard) for place in rest):
        return None
    count = len(row.operands)
    return PlacedRow(tuple(rest[:count]), tuple(rest[count:]))


def _combinations(example: Example, limit: int) -> Iterator[tuple[Placement, ...]]:
    """Combinations of operand placements: all, or, above `limit`, those of a single operand and a fixed sample."""
    options = [_placements(tensor) for tensor in example.tensors]
    total = math.prod(map(len, options))
    strides = itertools.accumulate(map(len, options[:-1]), int.__mul__, initial=1)
    single = {stride * index for stride, option in zip(strides, options, strict=False) for index in range(len(option))}
    chosen = range(total) if total <= limit else sorted({*single, *random.Random(0).sample(range(total), limit)})
    for number in chosen[1:]:  # 0 is replication
        placements = _combination(options, number)
        if example.checked or _fits(example.tensors, placements):
            yield placements


def _fits(tensors: Sequence[Tensor], placements: Sequence[Placement]) -> bool:
    """Whether dims of equal length stay equal: then kernels that do not check lengths can be run too."""
    cut = {tensor.shape[placement.dim] for tensor, placement in zip(tensors, placements, strict=True)
           if isinstance(placement, Shard)}  # fmt: skip
    whole = {
        size
        for tensor, placement in zip(tensors, placements, strict=True)
        for dim, size in enumerate(tensor.shape)
        if placement != Shard(dim)
    }
    return not cut & whole


def _combination(options: Sequence[Sequence[Placement]], number: int) -> tuple[Placement, ...]:
    placements = []
    for option in options:
        number, index = divmod(number, len(option))
        placements.append(option[index])
    return tuple(placements)


def _placements(tensor: Tensor) -> list[Placement]:
    """All placements of a tensor that are tried; integers (positions) and booleans are never Partial."""
    found: list[Placement] = [Replicate(), *(Shard(dim) for dim, size in enumerate(tensor.shape) if size > 1)]
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:  # 8-bit floats have no arithmetic
        found += [Partial(op) for op in REDUCTIONS]
    return [*found, Partial("sum")] if tensor.is_complex() else found


def _rows(
    versions: Sequence[Example], rule: Rule, operands: tuple[Placement, ...], sizes: Sequence[int]
) -> Iterator[PlacedRow]:
    """The rows with these operands that are right for all versions, numbers of shards and random splits."""
    candidates = [_placements(result) for result in versions[0].results]
    firsts = candidates[0] if rule.size_argument is not None else [None]
    draws = _DRAWS if any(isinstance(placement, Partial) for placement in operands) else 1
    for first in firsts:
        right = candidates if first is None else [[first], *candidates[1:]]
        for version, ranks, draw in itertools.product(versions, sizes, range(draws)):
            right = _right(version, rule, operands, right, ranks, draw)
            if not all(right):
                break
        for results in itertools.product(*([Replicate()] if Replicate() in options else options for options in right)):
            yield PlacedRow(operands, results)


def _right(
    example: Example,
    rule: Rule,
    operands: tuple[Placement, ...],
    candidates: Sequence[Sequence[Placement]],
    ranks: int,
    draw: int,
) -> list[list[Placement]]:
    """For every result, those candidates for which the plain operator on the ranks' operands is right."""
    generator = torch.Generator().manual_seed(100 * ranks + draw)
    shards = [
        split_placement(tensor, _whole(tensor), placement, ranks, generator)
        for tensor, placement in zip(example.tensors, operands, strict=True)
    ]
    strategy = Strategy(operands, (candidates[0][0], *(Replicate() for _ in candidates[1:])))
    whole = [_whole(result) for result in example.results]
    try:
        local = execute(example, rule, strategy, shards, whole, ranks)
    except FAILURES:
        return [[]]
    if any(len(given) != len(example.results) for given in local):
        return [[]]
    each = zip(candidates, zip(*local, strict=True), example.results, whole, strict=True)
    return [
        [option for option in options if mismatch(pieces, expected, option, grouping) is None]
        for options, pieces, expected, grouping in each
    ]


def _whole(tensor: Tensor) -> Grouping:
    return tuple((size,) for size in tensor.shape)
