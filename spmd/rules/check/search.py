"""The search for missing rows: the plain operator on shards, over all placements of small calls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

from spmd.placement import REDUCTIONS, Partial, Placement, Replicate, Shard
from spmd.rules.check.execute import Example, Grouping, execute, mismatch, split
from spmd.rules.check.report import Finding
from spmd.rules.rule import Rule
from spmd.rules.strategy import Strategy

_DRAWS = 6
"""How often the parts of Partial operands are drawn: small calls may be right by chance."""

PlacedRow: TypeAlias = tuple[tuple[Placement, ...], tuple[Placement, ...]]


def physical(strategy: Strategy, shapes: Sequence[Grouping]) -> PlacedRow | None:
    """A strategy's placements over physical dims; None where it cuts an inner factor of a dim."""
    placements: list[Placement] = []
    for placement, grouping in zip((*strategy.operands, *strategy.results), shapes, strict=True):
        if isinstance(placement, Shard):
            starts = list(itertools.accumulate((len(group) for group in grouping), initial=0))
            if placement.dim not in starts[:-1]:
                return None
            placement = Shard(starts.index(placement.dim))
        placements.append(placement)
    return tuple(placements[: len(strategy.operands)]), tuple(placements[len(strategy.operands) :])


def search(
    example: Example, rule: Rule, covered: Sequence[PlacedRow], sizes: Sequence[int], combinations: int
) -> Iterator[Finding]:
    """Rows on which the plain operator is right, for all of `sizes`, and which nothing covers."""
    options = [_placements(tensor) for tensor in example.tensors]
    whole = [tuple((size,) for size in result.shape) for result in example.results]
    rows = list(itertools.islice(itertools.product(*options), 200_000))[1:]
    if len(rows) > combinations:
        rows = random.Random(0).sample(rows, combinations)
    for operands in rows:
        right: list[tuple[Placement, ...]] | None = None
        for ranks, draw in itertools.product(sizes, range(_DRAWS)):
            found = _right_results(example, rule, operands, whole, ranks, draw)
            right = found if right is None else [row for row in right if row in found]
            right = [row for row in right if not any(_implies(known, (operands, row)) for known in covered)]
            if not right:
                break
        for results in right or ():
            yield Finding(str(example), max(sizes), operands, results)


def _placements(tensor: torch.Tensor) -> list[Placement]:
    """All placements of an operand that make a difference; parts of positions are none."""
    found: list[Placement] = [Replicate(), *(Shard(dim) for dim, size in enumerate(tensor.shape) if size > 1)]
    if tensor.is_floating_point():
        found += [Partial(op) for op in REDUCTIONS]
    return found


def _right_results(
    example: Example, rule: Rule, operands: Sequence[Placement], whole: Sequence[Grouping], ranks: int, draw: int
) -> list[tuple[Placement, ...]]:
    """All placements of the results for which the plain operator on the ranks' operands is right."""
    generator = torch.Generator().manual_seed(100 * ranks + draw)
    shards = [
        split(tensor, tuple((size,) for size in tensor.shape), placement, ranks, generator)
        for tensor, placement in zip(example.tensors, operands, strict=True)
    ]
    candidates = [_placements(result) for result in example.results]
    firsts = candidates[0] if rule.size_argument is not None else [Replicate()]
    found: list[tuple[Placement, ...]] = []
    for first in firsts:
        strategy = Strategy(tuple(operands), (first, *(Replicate() for _ in candidates[1:])))
        try:
            local = execute(example, rule, strategy, shards, whole, ranks)
        except (RuntimeError, IndexError, ValueError):
            continue
        if any(len(given) != len(example.results) for given in local):
            continue
        if rule.size_argument is not None:
            candidates[0] = [first]
        right = []
        for i, options in enumerate(candidates):
            pieces, expected = [given[i] for given in local], example.results[i]
            right.append([option for option in options if mismatch(pieces, expected, option, whole[i]) is None])
        found += itertools.product(*right)
    return found


def _implies(known: PlacedRow, row: PlacedRow) -> bool:
    free = all(wanted == given or given == Replicate() for wanted, given in zip(known[0], row[0], strict=True))
    return free and all(have == wanted or have == Replicate() for have, wanted in zip(known[1], row[1], strict=True))
