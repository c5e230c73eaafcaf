"""`check_rule`: every strategy of a rule run on virtual shards, against the unsharded operator."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmd.errors import SpmdError
from spmd.rules.check.execute import Example, Grouping, execute, logical_shapes, mismatch, split
from spmd.rules.check.report import Finding, Report
from spmd.rules.check.search import physical, search
from spmd.rules.rule import Rule
from spmd.rules.strategy import Strategy, derive_strategies


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
                wrong.append(Finding(str(example), ranks, strategy.operands, strategy.results, reason))
        if missing and values and all(meta.numel for meta in (*example.call.operands, *example.call.results)):
            covered = [physical(strategy, (*shapes, *results)) for strategy in strategies]
            absent += search(example, rule, [row for row in covered if row is not None], sizes, combinations)
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
