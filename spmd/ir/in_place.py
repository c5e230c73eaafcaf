"""Which results of an operation could be written into the memory of its operands, by its operator alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from functools import lru_cache
from typing import Any

import attrs
import torch

from spmd.ir.graph import Operation, Value, map_leaves
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
    if in_place_variant(operation.op) is None or operation.effect is not None or not operation.operands:
        return ()
    count = Counter(operation.operands)
    return tuple(
        (operand, result)
        for operand, result in _pairs(operation)
        if result is not None and operand.meta == result.meta and count[operand] == 1
    )


def _pairs(operation: Operation) -> list[tuple[Value, Value | None]]:
    results = operation.results
    if operation.op in FUSED:
        lists = operation.args[: returned_lists(operation.op)]
        positions = [position for position, values in enumerate(lists) for _ in values]
        results = tuple(r for position, r in zip(positions, results, strict=True) if position != GRADIENTS)
    found = targets(operation)
    return list(zip(found, results, strict=True)) if found else []


def targets(operation: Operation) -> list[Value]:
    """What the in-place variant of an operator writes to, in order; nothing if that is no tensor."""
    if operation.op in FUSED:
        lists = operation.args[: returned_lists(operation.op)]
        return [value for position, values in enumerate(lists) if position != GRADIENTS for value in values]
    first = operation.args[0]
    values = [first] if isinstance(first, Value) else first
    return list(values) if isinstance(values, (list, tuple)) else []


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
    taken = [[(argument.name, str(argument.type)) for argument in o._schema.arguments] for o in (op, found)]
    return found if taken[0] == taken[1] else None


@attrs.frozen
class InPlace:
    """An operator that may write its results into the memory of operands; called itself, it writes to none.

    Args:
        op: the operator.
        free: for each tensor that the in-place variant writes to, whether the program permits it.
    """

    op: OpOverload
    free: tuple[bool, ...]

    @property
    def __name__(self) -> str:
        name = self.op.overloadpacket.__name__
        return f"{name}_" if any(self.free) else name

    @property
    def takes_lists(self) -> bool:
        """Whether its first argument is a list of tensors."""
        return str(self.op._schema.arguments[0].type) == "List[Tensor]"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.op not in FUSED:
            return self.op(*args, **kwargs)
        args = map_leaves(torch.Tensor.contiguous, args)
        lists = enumerate(self.op(*args, **kwargs))
        return [None if position == GRADIENTS else tensor for position, tensors in lists for tensor in tensors]


def restricted(operation: Operation, writable: Container[Value]) -> Operation:
    """The operation, permitted to write into those of its operands only that are `writable`."""
    if not isinstance(operation.op, InPlace):
        return operation
    op, free = operation.op.op, operation.op.free
    targeted = targets(attrs.evolve(operation, op=op))
    free = tuple(permitted and value in writable for permitted, value in zip(free, targeted, strict=True))
    return attrs.evolve(operation, op=InPlace(op, free))
