"""`check_rule` runs every strategy of a rule on virtual shards, and compares with the unsharded operator."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from spmd.rules.rule import Rule
from spmd.rules.strategy import Strategy, derive_strategies
from spmd.testing.rule_check.execute import (
    FAILURES,
    Example,
    Grouping,
    execute,
    logical_shapes,
    mismatch,
    split_placement,
)
from spmd.testing.rule_check.report import Finding, Report
from spmd.testing.rule_check.search import is_implied, physical, search


def check_rule(
    op: torch._ops.OpOverload,
    rule: Rule,
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    *,
    sizes: Sequence[int] = (2, 3),
    missing: bool = True,
    combinations: int = 2500,
    values: bool = True,
    checked: bool = True,
) -> Report:
    """Prove a rule by execution.

    Args:
        op: the operator.
        rule: its rule.
        calls: arguments and keyword arguments of calls, with real tensors.
        sizes: the numbers of shards to try. Lengths that these do not divide have uneven and empty shards.
        missing: also search for missing rows, with the plain operator on all placements of the operands.
        combinations: the most combinations of operand placements to search for one call; if there are more, a fixed
            sample is searched.
        values: False for operators whose values are arbitrary (`empty`): only shapes and dtypes are compared then.
        checked: False for operators whose kernels do not check that shapes fit together, and otherwise access memory
            out of bounds: the search then leaves out placements that make equal lengths unequal.

    Returns:
        A report; `report.wrong` is empty if the rule is right.

    >>> import torch
    >>> from spmd.rules import RULES
    >>> neg = torch.ops.aten.neg.default
    >>> report = check_rule(neg, RULES[neg], [((torch.randn(4, 3),), {})])
    >>> report.wrong, report.missing
    ((), ())
    """
    report = Report(str(op))
    for args, kwargs in calls:
        example = Example.of(op, args, kwargs, checked=checked)
        report = report.join(_check_call(example, rule, sizes, combinations if missing else 0, values))
    return report


def _check_call(example: Example, rule: Rule, sizes: Sequence[int], combinations: int, values: bool) -> Report:
    factors = rule.factorize(example.call)
    shapes = logical_shapes(example.call.operands, factors.operands, factors)
    results = logical_shapes(example.call.results, factors.results, factors)
    strategies = derive_strategies(factors)
    wrong: list[Finding] = []
    for strategy, ranks in itertools.product(strategies, sizes):
        reason = _try(example, rule, strategy, (shapes, results), ranks, values)
        if reason is not None:
            wrong.append(Finding(str(example), ranks, strategy.operands, strategy.results, reason))
    report = Report(str(example.call.op), 1, len(strategies), len(strategies) * len(sizes) - len(wrong), tuple(wrong))
    if not combinations or not values or not _is_informative(example):
        return report
    valid = search(example, rule, sizes, combinations)
    covered = [row for row in (physical(strategy, (*shapes, *results)) for strategy in strategies) if row is not None]
    absent = [row for row in valid if not is_implied(row, covered)]
    missing = tuple(Finding(str(example), max(sizes), row.operands, row.results) for row in absent)
    return attrs.evolve(report, valid=len(valid), missing=missing)


def _is_informative(example: Example) -> bool:
    """Whether a call is worth a search: with an empty tensor, or one element per tensor, nearly all rows are right."""
    numbers = [meta.numel for meta in (*example.call.operands, *example.call.results)]
    return all(numbers) and max(numbers, default=0) > 1


def _try(
    example: Example,
    rule: Rule,
    strategy: Strategy,
    shapes: tuple[Sequence[Grouping], Sequence[Grouping]],
    ranks: int,
    values: bool,
) -> str | None:
    """What is wrong with one strategy on this number of ranks; None if it is right."""
    generator = torch.Generator().manual_seed(ranks)
    placed = zip(example.tensors, shapes[0], strategy.operands, strict=True)
    shards = [split_placement(tensor, grouping, placement, ranks, generator) for tensor, grouping, placement in placed]
    try:
        local = execute(example, rule, strategy, shards, shapes[1], ranks)
    except FAILURES as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for index, (expected, placement) in enumerate(zip(example.results, strategy.results, strict=True)):
        if len(local[0]) != len(example.results):
            return f"{len(local[0])} results, expected {len(example.results)}"
        reason = mismatch([given[index] for given in local], expected, placement, shapes[1][index], values=values)
        if reason is not None:
            return f"result {index}: {reason}"
    return None
