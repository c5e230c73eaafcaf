"""Which results of an operation could be written into the memory of its operands, by its operator alone."""

from __future__ import annotations

from functools import lru_cache

import torch

from spmd.ir.graph import Operation, Value
from spmd.ir.list_operators import FUSED, element_operator

OpOverload = torch._ops.OpOverload
aten = torch.ops.aten

GRADIENTS = 1
"""The position of the gradients among the arguments and the results of a fused optimizer, which does not change them as
long as no scale of them is given."""


def rewritable(operation: Operation) -> tuple[tuple[Value, Value], ...]:
    """Pairs of an operand and the result that the operator's in-place variant would write into its memory.

    Operand and result have the same shape and dtype, and the operation reads the operand nowhere else.
    """
    if in_place_variant(operation.op) is None or operation.effect is not None:
        return ()
    operands = operation.operands
    return tuple(
        (operand, result)
        for operand, result in _pairs(operation)
        if result is not None and operand.meta == result.meta and operands.count(operand) == 1
    )


def _pairs(operation: Operation) -> list[tuple[Value, Value | None]]:
    if operation.op in FUSED:
        lists = operation.args[: returned_lists(operation.op)]
        places = [(value, position) for position, values in enumerate(lists) for value in values]
        pairs = zip(places, operation.results, strict=True)
        return [(value, result) for (value, position), result in pairs if position != GRADIENTS]
    first = operation.args[0]
    operands = [first] if isinstance(first, Value) else first
    if not isinstance(operands, (list, tuple)) or not all(isinstance(operand, Value) for operand in operands):
        return []
    return list(zip(operands, operation.results, strict=True))


def returned_lists(op: OpOverload) -> int:
    """The number of lists that a fused optimizer returns, which are its first arguments."""
    return len(op._schema.returns)


@lru_cache(maxsize=4096)
def in_place_variant(op: OpOverload) -> OpOverload | None:
    """The operator that writes what an elementwise operator computes into its first operand; None if there is none.

    >>> in_place_variant(aten.add.Tensor), in_place_variant(aten._foreach_sqrt.default)
    (<OpOverload(op='aten.add_', overload='Tensor')>, <OpOverload(op='aten._foreach_sqrt_', overload='default')>)
    """
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.is_mutable:
        return None
    element = element_operator(op) or op
    if op not in FUSED and torch.Tag.pointwise not in element.tags:
        return None
    packet = getattr(aten, f"{op._schema.name.removeprefix('aten::')}_", None)
    if packet is None or op._overloadname not in packet.overloads():
        return None
    found: OpOverload = getattr(packet, op._overloadname)
    names = [[argument.name for argument in o._schema.arguments] for o in (op, found)]
    return found if names[0] == names[1] else None
