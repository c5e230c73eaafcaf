"""Proof of rules by execution: `check_rule` runs every strategy of a rule on virtual shards, and looks for more.

A strategy is wrong if its shards are not those of the unsharded operator's results. A row is missing if running the
plain operator on shards is right and no strategy says so, nor implies it: a replicated operand can be cut for free, and
a replicated result stands for any other.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from spmd.errors import SpmdError
from spmd.placement import REDUCTIONS, Partial, Placement, Replicate, Shard
from spmd.rules.execute import Example, Grouping, execute, logical_shapes, mismatch, split
from spmd.rules.rule import Rule
from spmd.rules.strategy import Strategy, derive_strategies


@attrs.frozen
class Finding:
    """One wrong or missing row: the call, the number of shards, the placements, and what is wrong with them."""

    call: str
    ranks: int
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    reason: str = ""

    def __str__(self) -> str:
        placed = f"{_text(self.operands)} -> {_text(self.results)}"
        return f"{self.call} over {self.ranks}: {placed}{': ' if self.reason else ''}{self.reason}"


@attrs.frozen
class Report:
    """What `check_rule` found.

    Args:
        op: the operator.
        passed: how many executions of strategies were right.
        wrong: strategies that gave other results than the unsharded operator.
        missing: placements that no strategy covers although the plain operator is right on them.
    """

    op: torch._ops.OpOverload
    passed: int
    wrong: tuple[Finding, ...]
    missing: tuple[Finding, ...]

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.passed} right, {len(self.wrong)} wrong, {len(self.missing)} missing"]
        lines += [f"  wrong    {finding}" for finding in self.wrong]
        return "\n".join([*lines, *(f"  missing  {finding}" for finding in self.missing)])


def check_rule(
    op: torch._ops.OpOverload,
    rule: Rule,
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    *,
    sizes: Sequence[int] = (2, 3),
    missing: bool = True,
    combinations: int = 150,
    values: bool = True,
) -> Report:
    """Prove a rule by execution.

    Args:
        op: the operator.
        rule: its rule.
        calls: arguments and keyword arguments of calls, with real tensors.
        sizes: the numbers of shards to try. Lengths that these do not divide give uneven and empty shards.
        missing: also search for missing rows, with the plain operator on all placements of the operands.
        combinations: the most placements of operands that one call is searched over; above it, a fixed sample.
        values: False for operators whose values are arbitrary (`empty`): only shapes and dtypes are compared then.

    Returns:
        A report; `report.wrong` is empty if the rule is right.

    >>> import torch
    >>> from spmd.rules import RULES
    >>> neg = torch.ops.aten.neg.default
    >>> report = check_rule(neg, RULES[neg], [((torch.randn(4, 3),), {})])
    >>> report.wrong, report.missing
    ((), ())
    """
    passed = 0
    wrong: list[Finding] = []
    absent: list[Finding] = []
    for args, kwargs in calls:
        example = Example.of(op, args, kwargs)
        factors = rule.factorize(example.call)
        shapes = logical_shapes(example.call.operands, factors.operands, factors)
        results = logical_shapes(example.call.results, factors.results, factors)
        strategies = derive_strategies(factors)
        for strategy, ranks in itertools.product(strategies, sizes):
            reason = _try(example, rule, strategy, (shapes, results), ranks, values)
            if reason is None:
                passed += 1
            else:
                wrong.append(Finding(_call_text(example), ranks, strategy.operands, strategy.results, reason))
        if missing and values and all(meta.numel for meta in (*example.call.operands, *example.call.results)):
            covered = [_physical(strategy, (*shapes, *results)) for strategy in strategies]
            absent += _search(example, rule, [row for row in covered if row is not None], sizes, combinations)
    return Report(op, passed, tuple(wrong), tuple(absent))


def _try(
    example: Example,
    rule: Rule,
    strategy: Strategy,
    shapes: tuple[Sequence[Grouping], Sequence[Grouping]],
    ranks: int,
    values: bool,
) -> str | None:
    """What is wrong with one strategy; None if nothing is."""
    generator = torch.Generator().manual_seed(ranks)
    placed = zip(example.tensors, shapes[0], strategy.operands, strict=True)
    shards = [split(tensor, grouping, placement, ranks, generator) for tensor, grouping, placement in placed]
    try:
        local = execute(example, rule, strategy, shards, shapes[1], ranks)
    except (RuntimeError, IndexError, ValueError, TypeError, SpmdError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for index, (expected, placement) in enumerate(zip(example.results, strategy.results, strict=True)):
        if len(local[0]) != len(example.results):
            return f"{len(local[0])} results, expected {len(example.results)}"
        reason = mismatch([given[index] for given in local], expected, placement, shapes[1][index], values=values)
        if reason is not None:
            return f"result {index}: {reason}"
    return None


_DRAWS = 6
"""How often the parts of Partial operands are drawn: small calls may be right by chance."""

_Row: TypeAlias = tuple[tuple[Placement, ...], tuple[Placement, ...]]


def _physical(strategy: Strategy, shapes: Sequence[Grouping]) -> _Row | None:
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


def _search(
    example: Example, rule: Rule, covered: Sequence[_Row], sizes: Sequence[int], combinations: int
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
            yield Finding(_call_text(example), max(sizes), operands, results)


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


def _implies(known: _Row, row: _Row) -> bool:
    free = all(wanted == given or given == Replicate() for wanted, given in zip(known[0], row[0], strict=True))
    return free and all(have == wanted or have == Replicate() for have, wanted in zip(known[1], row[1], strict=True))


def _call_text(example: Example) -> str:
    metas = ", ".join(map(str, example.call.operands))
    rest = [argument for argument in example.call.args if isinstance(argument, (bool, int, float, str))]
    return f"{example.call.op}({metas}{'; ' if rest else ''}{', '.join(map(str, rest))})"


def _text(placements: Sequence[Placement]) -> str:
    return ", ".join(map(repr, placements))
