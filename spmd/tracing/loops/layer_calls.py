"""Layers as programs that are called with other operands: what depends on memory is left to the caller.

A program takes and returns contiguous tensors. The strides of operands and results are permutations around it, and a
result that is a view of an operand or of another result is that view again, of the caller's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import attrs
import torch

from spmd.ir.graph import Graph, Value, producers_of
from spmd.ir.operator_kinds import COPIES
from spmd.tracing.active_transforms import unwrapped
from spmd.tracing.closures import ClosureLifting
from spmd.tracing.loops.calls import Tensors, apply
from spmd.tracing.loops.closed import close
from spmd.tracing.loops.constructs import Subprogram
from spmd.tracing.loops.per_rank import cast_once, cast_to, known_types
from spmd.tracing.loops.replay import replay
from spmd.tracing.memory_order import Order, in_memory_order, memory_order, of_memory_order
from spmd.tracing.running import running_trace


@attrs.frozen(eq=False)
class _Results:
    """The results of a function of tensors: views of operands, and of results with memory of their own.

    Args:
        views: each result as a view of a value that is in `made`, or stands for an operand or what is closed over.
        made: of each result with memory of its own, its number and memory order.
        operands: what stands for the operands.
    """

    views: Sequence[Graph]
    made: Mapping[Value, tuple[int, Order]]
    operands: Sequence[Value]

    @classmethod
    def of(cls, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> _Results | None:
        """The results of a function that was traced; None if they have other memory, or other gradients."""
        trace = cast("ClosureLifting", running_trace())
        given, values = [trace.value(x) for x in operands], [trace.value(trace.take(x)) for x in results]
        producers = producers_of(trace.recorder.operations)
        for value in given:
            producers.pop(value, None)
        views: list[Graph] = []
        made: dict[Value, tuple[int, Order]] = {}
        for value in values:
            bases = [value]
            while (before := producers.get(bases[-1])) is not None and before.is_view and before.op not in COPIES:
                bases.append(before.operands[0])
            if before is not None:
                base = next(base for base in reversed(bases) if base in values)
                bases = bases[: bases.index(base) + 1]
                order = memory_order(results[values.index(base)])
                if order is None:
                    return None
                made[base] = values.index(base), order
            steps = [producers[base] for base in reversed(bases[:-1])]
            views.append(Graph((bases[-1],), (), tuple(steps), (value,)))
        has_views = any(view.operations for view in views)
        if trace.hides_gradients or (trace.changes_grad_mode and (has_views or not torch.is_grad_enabled())):
            return None  # where the caller makes them, views have other gradients
        memory = [trace.finish(unwrapped(results[number])).untyped_storage()._cdata for number, _ in made.values()]
        is_own = len(set(memory)) == len(memory) and trace.recorder.owns(memory)
        return cls(views, made, given) if made and is_own else None


@attrs.frozen(eq=False)
class LayerProgram:
    """A function of tensors as a program.

    Args:
        program: from contiguous operands, and the tensors that it closes over, to contiguous results.
        orders: the memory orders of the operands.
        closed_over: the tensors that it closes over.
        results: the results of the function.
    """

    program: Subprogram
    orders: Sequence[Order]
    closed_over: tuple[torch.Tensor, ...]
    results: _Results

    @classmethod
    def of(cls, function: Callable[..., Tensors], *operands: torch.Tensor) -> LayerProgram | None:
        """The program of a function from tensors to a list of tensors, of operands that have memory orders.

        None if its results are other than `_Results` says, or if it calls autograd.Functions.
        """
        orders = [memory_order(x) or () for x in operands]
        found: list[_Results | None] = []

        def dense(*tensors: torch.Tensor) -> Tensors:
            inside = list(map(of_memory_order, tensors, orders))
            results = function(*inside)
            if not found:
                found.append(_Results.of(inside, results))
            made = found[0].made.values() if found[0] is not None else ()
            return [in_memory_order(results[number], order) for number, order in made]

        closed = close(dense, *map(in_memory_order, operands, orders))
        (results,) = found
        if results is None or closed.body.functions:
            return None
        returned = [view.inputs[0] for view in results.views]
        graph, inputs = closed.body.graph, zip(closed.body.inputs, operands, strict=False)
        casts = [{} if value in returned else cast_to(value, graph) for value, _ in inputs]
        if any(casts):  # the caller casts, once for all calls
            return cls.of(function, *map(cast_once, operands, casts))
        return cls(Subprogram(closed.body), orders, closed.closed_over, results)

    def __call__(self, *operands: torch.Tensor) -> Tensors:
        """The results of the function for other operands, of equal shapes, dtypes and memory orders."""
        types = known_types()
        given = [*map(in_memory_order, operands, self.orders), *self.closed_over]
        if types is not None:
            given = [cast_once(x, types.of(value)) for x, value in zip(given, self.program.body.inputs, strict=True)]
        made = apply(self.program, *given)
        tensors = dict(zip(self.program.body.inputs[len(operands) :], self.closed_over, strict=True))
        tensors |= dict(zip(self.results.operands, operands, strict=True))
        orders = [order for _, order in self.results.made.values()]
        tensors |= dict(zip(self.results.made, map(of_memory_order, made, orders), strict=True))
        return [replay(view, [tensors[view.inputs[0]]], apply)[0] for view in self.results.views]
