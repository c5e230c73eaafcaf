"""What follows from the program of a plan, computed once for all plans that differ in schedules and times only."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, TypeVar

import attrs
from typing_extensions import TypeVarTuple, Unpack

from spmd.ir.graph import Graph
from spmd.plan.data.plan import PlanData

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")


def of_graph(function: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """Cache a function of a graph as long as that exists; the result must not hold it."""
    found: weakref.WeakKeyDictionary[Graph, T] = weakref.WeakKeyDictionary()

    @wraps(function)
    def cached(graph: Graph) -> T:
        if graph not in found:
            found[graph] = function(graph)
        return found[graph]

    return cached


@attrs.define
class _Cached(Generic[T]):
    """The results of a function, by its arguments, for plans of a graph with the same decisions."""

    decisions: tuple[object, ...] = ()
    by_arguments: dict[Any, T] = attrs.field(factory=dict)


def of_program(function: Callable[[PlanData, Unpack[Arguments]], T]) -> Callable[[PlanData, Unpack[Arguments]], T]:
    """Cache a function of a plan, and of hashable arguments, as long as the plan's graph exists.

    It must not read the plan's `gap`, `seconds`, `comms` and `schedule`, and its result must not hold the graph.
    """
    results_of: Callable[[Graph], _Cached[T]] = of_graph(lambda _: _Cached())

    @wraps(function)
    def cached(plan: PlanData, *arguments: Unpack[Arguments]) -> T:
        results, decisions = results_of(plan.graph), (plan.request, plan.logical, plan.specs, plan.strategies)
        if not (results.decisions and all(map(operator.is_, results.decisions, decisions))):
            results.decisions, results.by_arguments = decisions, {}
        known = results.by_arguments
        if arguments not in known:
            known[arguments] = function(plan, *arguments)
        return known[arguments]

    return cached
