"""Why a plan communicates: for every redistribution, the operator that produces the value and its first consumer."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from spmd.collectives.primitives import COLLECTIVES
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import MARKERS, REDISTRIBUTE
from spmd.ir.printing import operator_name
from spmd.ir.source import Source
from spmd.plan.data.layout import Layout


@attrs.frozen
class Cause:
    """Why a value is redistributed: a sentence, and the line of the user's code (None if unknown)."""

    text: str
    source: Source | None


def find_causes(graph: Graph, layout: Callable[[Value], Layout]) -> dict[Operation, Cause]:
    """The cause of every redistribution of a planned program.

    The sentence names the producer with the layout that it produces, and the first consumer with the layout that it
    requires. Views and markers in between are skipped. The line is that of the redistribution itself, else that of the
    consumer, else that of the producer.

    Args:
        graph: the program, with its redistributions as explicit operations.
        layout: the layout of a value.
    """
    causes = {}
    for operation in graph.operations:
        if operation.op is REDISTRIBUTE:
            (operand,), (result,) = operation.operands, operation.tensors
            origin, taker = graph.origin(operand, is_passed), consumer_of(graph, result)
            giver = graph.producers.get(origin)
            produced = f"input {origin.name} has" if giver is None else f"{giver.name} produces"
            required = "the result" if taker is None else taker.name
            sources = (party.source for party in (operation, taker, giver) if party is not None)
            text = f"{produced} {layout(operand)}, {required} requires {layout(result)}"
            causes[operation] = Cause(text, next(filter(None, sources), None))
    return causes


def cause_of(operation: Operation) -> Cause:
    """Why an operation that is no redistribution communicates: its line calls a collective, or its rule does."""
    if operation.op in COLLECTIVES:
        bound = ", at most: its sizes are data, and every row of its operand counts"
        at_most = bound if COLLECTIVES[operation.op].sizes_are_data else ""
        return Cause(f"{operation.name} of a shard_map body{at_most}", operation.source)
    return Cause(f"{operator_name(operation.op)} over a sharded dim", operation.source)


def is_passed(operation: Operation) -> bool:
    """Test for a view or a marker, which stands between those that a cause names."""
    return operation.op in MARKERS or operation.is_view


def consumer_of(graph: Graph, value: Value) -> Operation | None:
    """The first consumer of a value that is no view or marker; None for one that is only a result of the program."""
    while value in graph.consumers:
        consumer = graph.consumers[value][0]
        if not is_passed(consumer):
            return consumer
        value = consumer.tensors[0]
    return None
