"""Splits list operators (`_foreach_*`) into one operation per element, and joins such operations.

Element `i` of `_foreach_X.Y` is `aten.X` of the `i`-th items of the lists; arguments that are not lists are shared by
all elements. Operations that come from the same list operator have the same `Operation.group`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import attrs
import torch

from spmd.ir.graph import Graph, Operation, Value

OpOverload = torch._ops.OpOverload
aten = torch.ops.aten

FUSED: tuple[OpOverload, ...] = tuple(
    getattr(packet, overload)
    for packet in (aten._fused_sgd, aten._fused_adam, aten._fused_adamw)
    for overload in ("default", "tensor_lr")
)
"""The fused optimizers. Their element operators are they themselves, on lists of one tensor. They return their first
lists: parameters, gradients and states."""

_PREFIX = "aten::_foreach_"
_OVERLOADS: Mapping[str, tuple[str, ...]] = {
    "default": ("default",),
    "List": ("Tensor", "Tensor_Tensor", "default"),
    "Tensor": ("Tensor", "default"),
    "Scalar": ("Tensor_Scalar", "Scalar", "default"),
    "ScalarList": ("Tensor_Scalar", "Scalar", "default"),
    "ScalarAndTensor": ("Scalar",),
}
"""For each overload of a list operator, the overloads of the element operator to try, in order."""

_RENAMED: Mapping[str, OpOverload] = {
    **{f"{name}.{kind}": getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")
       for kind in ("Scalar", "ScalarList")},
    "maximum.Scalar": aten.clamp_min.default,
    "maximum.ScalarList": aten.clamp_min.default,
    "minimum.Scalar": aten.clamp_max.default,
    "minimum.ScalarList": aten.clamp_max.default,
    "norm.Scalar": aten.linalg_vector_norm.default,
    "zero.default": aten.zeros_like.default,
}  # fmt: skip
"""Element operators with another name or overload than the list operator; `add.Tensor` also takes a Python number."""


_Tensors: TypeAlias = list[torch.Tensor] | tuple[torch.Tensor, ...]


def _scaled(tensors: _Tensors, scalars: torch.Tensor) -> _Tensors:
    numbers = [scalar.to(x.dtype) for scalar, x in zip(scalars.unbind(), tensors, strict=True)]
    return torch._foreach_mul(tensors, numbers)


def _addcmul(x: Any, first: Any, second: Any, scalars: torch.Tensor) -> _Tensors:
    return torch._foreach_add(x, torch._foreach_mul(_scaled(first, scalars), second))


def _addcdiv(x: Any, first: Any, second: Any, scalars: torch.Tensor) -> _Tensors:
    return torch._foreach_add(x, torch._foreach_div(_scaled(first, scalars), second))


def _powsum(x: Any, ord: float = 2, dtype: torch.dtype | None = None) -> _Tensors:
    return [power.sum(dtype=dtype) for power in torch._foreach_pow(torch._foreach_abs(x), ord)]


_BODIES: Mapping[str, Callable[..., _Tensors]] = {
    "addcmul.Tensor": _addcmul,
    "addcdiv.Tensor": _addcdiv,
    "powsum.Scalar": _powsum,
}


@lru_cache(maxsize=1024)
def list_decomposition(op: OpOverload) -> Callable[..., _Tensors | None] | None:
    """The decomposition of a list operator that has no element operator, or of its in-place form; None for others.

    `_foreach_addcmul.Tensor`, for example, reads the scalars of all elements from one tensor, and a fake tensor has no
    values to read.
    """
    key = f"{op._schema.name.removeprefix(_PREFIX)}.{op._overloadname}"
    body = _BODIES.get(key.replace("_.", "."))
    return _in_place(body) if body is not None and "_." in key else body


def _in_place(body: Callable[..., _Tensors]) -> Callable[..., None]:
    def write(x: _Tensors, *args: Any) -> None:
        for item, value in zip(x, body(x, *args), strict=True):
            item.copy_(value)

    return write


@lru_cache(maxsize=1024)
def element_operator(op: OpOverload) -> OpOverload | None:
    """The operator that the list operator `op` applies to each element; None if there is none.

    >>> element_operator(aten._foreach_add.List), element_operator(aten._foreach_sqrt.default)
    (<OpOverload(op='aten.add', overload='Tensor')>, <OpOverload(op='aten.sqrt', overload='default')>)
    """
    name = op._schema.name
    key = f"{name.removeprefix(_PREFIX)}.{op._overloadname}"
    if not name.startswith(_PREFIX) or key in _BODIES:
        return None
    if key in _RENAMED:
        return _RENAMED[key]
    packet = getattr(aten, name.removeprefix(_PREFIX), None)
    for overload in _OVERLOADS.get(op._overloadname, ()):
        if packet is not None and overload in packet.overloads():
            return getattr(packet, overload)  # type: ignore[no-any-return]
    return None


def split_lists(graph: Graph) -> Graph:
    """Replace every list operator that has an element operator by one operation per element, all in one group."""
    group = 1 + max((operation.group or 0 for operation in graph.operations), default=0)
    operations: list[Operation] = []
    for operation in graph.operations:
        element = element_operator(operation.op)
        if element is None:
            operations.append(operation)
            continue
        operations.extend(_element(operation, element, index, group) for index in range(len(operation.results)))
        group += 1
    return attrs.evolve(graph, operations=tuple(operations))


def _element(operation: Operation, element: OpOverload, index: int, group: int) -> Operation:
    parameters = element._schema.arguments
    by_name = {parameter.name: parameter for parameter in parameters}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    given = [*zip(operation.op._schema.arguments, operation.args, strict=False)]
    given += [(p, operation.kwargs[p.name]) for p in operation.op._schema.arguments if p.name in operation.kwargs]
    for position, (parameter, argument) in enumerate(given):
        item = argument[index] if isinstance(argument, (list, tuple)) else argument
        target = by_name.get(parameter.name, parameters[min(position, len(parameters) - 1)])
        if not target.kwarg_only:
            args.append(item)
        elif item != target.default_value:
            kwargs[target.name] = item
    return attrs.evolve(
        operation, op=element, args=tuple(args), kwargs=kwargs, results=(operation.results[index],), group=group
    )


def join_elements(operations: Sequence[Operation]) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None:
    """One call of a list operator that computes several operations, the inverse of `split_lists`.

    Args:
        operations: calls of one operator, each with one result.

    Returns:
        The list operator with its positional and keyword arguments; None if there is none, or if arguments differ that
        it shares between all elements.
    """
    first = operations[0]
    if any(op.op is not first.op or len(op.args) != len(first.args) for op in operations):
        return None
    if first.op in FUSED:
        columns = zip(*(operation.args for operation in operations), strict=True)
        return first.op, tuple([item for items in column for item in items] for column in columns), dict(first.kwargs)
    if len(first.results) != 1:
        return None
    for candidate in _list_operators(first.op):
        joined = _join_arguments(candidate, operations)
        if joined is not None:
            return candidate, *joined
    return None


@lru_cache(maxsize=1024)
def _list_operators(element: OpOverload) -> tuple[OpOverload, ...]:
    base = element._schema.name.removeprefix("aten::")
    names = {base, *(key.split(".")[0] for key, op in _RENAMED.items() if op is element)}
    packets = [getattr(aten, f"_foreach_{name}") for name in sorted(names) if hasattr(aten, f"_foreach_{name}")]
    overloads = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return tuple(op for op in overloads if element_operator(op) is element)


def _join_arguments(op: OpOverload, operations: Sequence[Operation]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    element = operations[0].op._schema.arguments
    left = {name for operation in operations for name in operation.kwargs}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for position, parameter in enumerate(op._schema.arguments):
        own = {p.name: p for p in element}.get(parameter.name, element[min(position, len(element) - 1)])
        if not parameter.kwarg_only and not own.kwarg_only and position >= len(operations[0].args):
            args.append(parameter.default_value)  # not passed; the element operator has the same default
            continue
        column = tuple(_given(operation, own, position) for operation in operations)
        joined = _join_column(str(parameter.type), column)
        if joined is _MISFIT:
            return None
        left.discard(own.name)
        if not parameter.kwarg_only:
            args.append(joined)
        elif joined != parameter.default_value:
            kwargs[parameter.name] = joined
    if left or len(args) < len(operations[0].args):
        return None
    return tuple(args), kwargs


def _given(operation: Operation, parameter: Any, position: int) -> Any:
    if parameter.kwarg_only:
        return operation.kwargs.get(parameter.name, parameter.default_value)
    return operation.args[position]


def _join_column(kind: str, column: tuple[Any, ...]) -> Any:
    """One argument of the list operator from those of the elements; `_MISFIT` if they do not fit its type `kind`."""
    tensors = [isinstance(item, Value) for item in column]
    if kind == "List[Tensor]":
        return list(column) if all(tensors) else _MISFIT
    if kind.startswith("List["):
        return _MISFIT if any(tensors) else list(column)
    same = all(item is column[0] if isinstance(item, Value) else item == column[0] for item in column)
    return column[0] if same and tensors[0] == (kind == "Tensor") else _MISFIT


_MISFIT = object()
