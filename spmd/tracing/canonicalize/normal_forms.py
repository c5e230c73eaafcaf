"""Normal forms: of several operators that mean the same, the one that canonical programs use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from spmd.collectives.primitives import UNTYPED
from spmd.core.spec import TensorMeta
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.operator_kinds import FILLS, fill_number
from spmd.ir.simplify import makes_channels_last

OpOverload = torch._ops.OpOverload
aten = torch.ops.aten

OperatorCall = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]
"""An operator with its positional and keyword arguments."""

_Form = Callable[[Operation], OperatorCall]
"""From an operation to the call that computes the same in normal form."""


def normalize(graph: Graph) -> Graph:
    """Rewrite every operation to its normal form, with non-negative dims, explicit sizes and no device or layout."""
    return attrs.evolve(graph, operations=tuple(map(_normalize, graph.operations)))


def _normalize(operation: Operation) -> Operation:
    if makes_channels_last(operation):
        return _without_device(operation, _PLACE - {"memory_format"})
    form = NORMAL_FORMS.get(operation.op)
    if form is not None:
        op, args, kwargs = form(operation)
        return attrs.evolve(operation, op=op, args=args, kwargs=kwargs)
    return _without_device(_positive_dims(operation))


def _meta(operation: Operation) -> TensorMeta:
    return operation.tensors[0].meta


def _view(operation: Operation) -> OperatorCall:
    return aten.view.default, (operation.args[0], list(_meta(operation).shape)), {}


def _expand(operation: Operation) -> OperatorCall:
    return aten.expand.default, (operation.args[0], list(_meta(operation).shape)), {}


def _cast(operation: Operation) -> OperatorCall:
    return aten._to_copy.default, (operation.args[0],), {"dtype": _meta(operation).dtype}


def _permute(order: Callable[[int, tuple[Any, ...]], list[int]]) -> _Form:
    def form(operation: Operation) -> OperatorCall:
        ndim = _meta(operation).ndim
        return aten.permute.default, (operation.args[0], [d % ndim for d in order(ndim, operation.args)]), {}

    return form


def _swapped(ndim: int, args: tuple[Any, ...]) -> list[int]:
    order = list(range(ndim))
    if ndim:
        first, second = args[1], args[2]
        order[first], order[second] = order[second], order[first]
    return order


def _filled(operation: Operation) -> OperatorCall:
    """`full` of one number; uninitialized memory becomes zeros, so that results do not depend on the mesh."""
    number = fill_number(operation.op, operation.args) if operation.op in FILLS else 0
    if isinstance(number, Value):
        return operation.op, operation.args, dict(operation.kwargs)
    meta = _meta(operation)
    return aten.full.default, (list(meta.shape), number), {"dtype": meta.dtype}


def _renamed(op: OpOverload) -> _Form:
    return lambda operation: (op, operation.args, dict(operation.kwargs))


_PLACE = frozenset({"device", "layout", "pin_memory", "memory_format"})
_STACKING = frozenset({aten.stack.default})


def _without_device(operation: Operation, place: frozenset[str] = _PLACE) -> Operation:
    """The operation without device and layout, which the mesh decides; a factory's dtype becomes explicit."""
    if not place & operation.kwargs.keys():
        return operation
    kwargs = {name: value for name, value in operation.kwargs.items() if name not in place}
    if not operation.operands and any(parameter.name == "dtype" for parameter in operation.op._schema.arguments):
        kwargs["dtype"] = _meta(operation).dtype
    return attrs.evolve(operation, kwargs=kwargs)


def _positive_dims(operation: Operation) -> Operation:
    """The operation without negative dims, in the arguments that the schema calls `dim` or `dims`."""
    args = list(operation.args)
    for position, (parameter, argument) in enumerate(zip(operation.op._schema.arguments, args, strict=False)):
        if parameter.name not in ("dim", "dims") or not operation.operands:
            continue
        # A negative dim counts from the end of the result where the first operand may have fewer dims: cat accepts
        # 1-d empty tensors beside others; stack and select_backward add a dim.
        by_result = operation.op in _STACKING or operation.op is aten.cat.default or _restores_shape(operation.op)
        ndim = _meta(operation).ndim if by_result else operation.operands[0].meta.ndim
        if isinstance(argument, int) and not isinstance(argument, bool) and argument < 0:
            args[position] = argument % max(ndim, 1)
        elif isinstance(argument, (list, tuple)) and all(isinstance(dim, int) for dim in argument):
            args[position] = [dim % max(ndim, 1) for dim in argument]
    if args == list(operation.args):
        return operation
    return attrs.evolve(operation, args=tuple(args))


def _restores_shape(op: OpOverload) -> bool:
    return any(parameter.name == "input_sizes" for parameter in op._schema.arguments)


def _each(form: _Form, *ops: OpOverload) -> dict[OpOverload, _Form]:
    return dict.fromkeys(ops, form)


NORMAL_FORMS: Mapping[OpOverload, _Form] = {
    **_each(
        _view,
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default,
        aten.view_copy.default, aten.unsqueeze.default, aten.unsqueeze_copy.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
        aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims,
    ),
    **_each(_expand, aten.expand.default, aten.expand_copy.default),
    **_each(_cast, aten._to_copy.default, torch.ops.prims.convert_element_type.default),
    **_each(_permute(lambda ndim, args: list(reversed(range(ndim)))), aten.t.default, aten.t_copy.default),
    **_each(_permute(_swapped), aten.transpose.int, aten.transpose_copy.int),
    **_each(_permute(lambda ndim, args: list(args[1])), aten.permute.default, aten.permute_copy.default),
    **_each(
        _filled,
        *FILLS, aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default,
        aten.new_empty_strided.default,
    ),
    **{getattr(aten, name).Scalar: _renamed(getattr(aten, name).Tensor) for name in ("add", "sub", "mul", "div")},
    aten.div.Scalar_mode: _renamed(aten.div.Tensor_mode),
    # torch's lazy conjugate and negative bits become explicit operators: the copies that resolve them are removed.
    aten._conj.default: _renamed(aten.conj_physical.default),
    aten._neg_view.default: _renamed(aten.neg.default),
    # The types of per-rank values have served: derivatives are taken.
    **{op: _renamed(plain) for op, plain in UNTYPED.items()},
}  # fmt: skip
"""For each operator with a normal form, the function that rewrites an operation to it."""
