"""What follows from the program of a plan, computed once for all plans that differ in schedules and times only."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from typing_extensions import TypeVarTuple, Unpack

from spmd.ir.graph import Graph
from spmd.plan.data.plan import PlanData

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")


def of_program(function: Callable[[PlanData, Unpack[Arguments]], T]) -> Callable[[PlanData, Unpack[Arguments]], T]:
    """Cache a function of a plan, and of hashable arguments, as long as the plan's graph exists.

    It must not read the plan's `gap`, `seconds`, `comms` and `schedule`, and its result must not hold the graph.
    """
    found: weakref.WeakKeyDictionary[Graph, tuple[tuple[object, ...], dict[Any, T]]] = weakref.WeakKeyDictionary()

    @wraps(function)
    def cached(plan: PlanData, *arguments: Unpack[Arguments]) -> T:
        decisions = (plan.request, plan.logical, plan.specs, plan.strategies)
        before, results = found.get(plan.graph, (None, {}))
        if before is None or not all(map(operator.is_, before, decisions)):
            results = {}
            found[plan.graph] = decisions, results
        if arguments not in results:
            results[arguments] = function(plan, *arguments)
        return results[arguments]

    return cached
