"""The specs that a user gave for a value of a program: `in_specs`, `out_specs` and constraints."""

from __future__ import annotations

from collections.abc import Iterator

from spmd.inspect.questions.explanation import Pin
from spmd.ir.graph import Operation, Value
from spmd.plan.data.draft import Draft
from spmd.plan.data.layout import Layout


def producer_of(draft: Draft, value: Value) -> Operation | None:
    """The operation that computes a value; None for an input or a constant."""
    return next((operation for operation in draft.graph.operations if value in operation.tensors), None)


def _users(draft: Draft, value: Value) -> list[Operation]:
    return [operation for operation in draft.graph.operations if value in operation.operands]


def pins_of(draft: Draft, value: Value) -> Iterator[Pin]:
    """The specs given for a value: as an input, by its producer, and by its consumers."""
    producer = producer_of(draft, value)
    if value in draft.graph.inputs:
        yield _input_pin(draft, value)
    if producer is not None and producer in draft.pinned:
        yield pin_of(draft, producer)
    for user in _users(draft, value):
        if user in draft.pinned:
            yield pin_of(draft, user)


def pin_of(draft: Draft, operation: Operation) -> Pin:
    """The pin that a pinned operation stands for; only constraints have a source line, inputs and results have none."""
    if operation.source is not None:
        return Pin("constrained", _layout(draft, operation), operation.source)
    first = operation
    while (producer := producer_of(draft, first.operands[0])) is not None and producer in draft.pinned:
        first = producer
    if first.operands[0] in draft.graph.inputs:
        return _input_pin(draft, first.operands[0])
    last = operation
    while last.tensors[0] not in draft.graph.outputs:
        last = next(user for user in _users(draft, last.tensors[0]) if user in draft.pinned)
    position = draft.graph.outputs.index(last.tensors[0])
    return Pin(f"out_specs of result {position}", _layout(draft, last), None)


def _input_pin(draft: Draft, value: Value) -> Pin:
    return Pin("in_specs", str(Layout(draft.given[value], draft.logical[value])), None)


def _layout(draft: Draft, operation: Operation) -> str:
    return str(Layout(draft.pinned[operation][1], draft.logical[operation.tensors[0]]))
