"""Functionalization: torch's own, with corrections where it is incomplete or wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import can_auto_functionalize
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._mode_utils import no_dispatch

from spmd.errors import TraceError
from spmd.ir.effectful import effectful_form, has_side_effects
from spmd.ir.graph import map_leaves
from spmd.ir.list_operators import list_decomposition
from spmd.ir.operator_kinds import INDEXED_WRITES, is_composite
from spmd.ir.random_operators import is_random
from spmd.tracing.assignments import check_masks
from spmd.tracing.counter_draws import drawn
from spmd.tracing.draw_scopes import draw_scope
from spmd.tracing.nested_tracers import refuse_recording
from spmd.tracing.operand_dtypes import check_products
from spmd.tracing.overlapping import OverlappingViews
from spmd.tracing.replacements import REPLACEMENTS
from spmd.tracing.source import where
from spmd.tracing.strides import check_out, loses_strides, write_copies
from spmd.tracing.traced_tensor import plain_types, retyped
from spmd.tracing.written_operands import write, writes_to_operands

aten = torch.ops.aten

_SAFE = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    torch.ops.prims.view_of.default: aten.alias.default,
}
"""Views that torch does not track as views, and the views to use instead: a write to them must reach their base."""

_RESIZES = frozenset({aten.resize_.default, aten.resize_as_.default})


class Functionalization(FunctionalTensorMode):
    """Torch's functionalization mode, with replacements for operators that it handles wrongly or that read values.

    The error checks of torch.linalg are dropped, because they read values: the inverse of a singular matrix is not
    finite, and no error is raised. Composite operators are decomposed here and not below functionalization, because
    their decompositions may write in place to tensors that they create.

    Args:
        lift: maps a tensor from outside of the trace to its functional fake tensor, and any other value to itself.
            Needed here because a torch.func transform inside the function hides such a tensor from
            `__torch_function__`, and functionalization would not track the results of operators on it.
    """

    def __init__(self, lift: Callable[[Any], Any]) -> None:
        super().__init__()
        self._lift = lift
        self._repeated = OverlappingViews()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # torch asks for it of each tensor that it wraps
        if func is aten._linalg_check_errors.default:
            return None
        refuse_recording()
        with self:
            args, kwargs = map_leaves(self._lift, args), map_leaves(self._lift, kwargs or {})
        func = _SAFE.get(func, func)
        if func in INDEXED_WRITES:
            check_masks(args[0], args[1])
        check_products(func, args)
        scope = draw_scope()
        if scope is not None and is_random(func, args, kwargs):
            with self:
                result = drawn(func, args, kwargs, scope)
            if result is not NotImplemented:
                return result
        if func in REPLACEMENTS:
            with self:
                result = REPLACEMENTS[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable:
            with self:
                written = self._repeated.write(func, args, kwargs)
            if written is not None:
                return written if func._schema.returns else None
        body = list_decomposition(func) if func._schema.is_mutable else None
        if func not in FunctionalTensor.metadata_fns and is_composite(func):
            body = func.decompose
        if body is not None:
            with self:
                return body(*args, **kwargs)
        if writes_to_operands(func):
            with self:
                return write(func, args, kwargs)
        if has_side_effects(func):
            with self:
                result = effectful_form(func)(*args, **kwargs)
            return result if func._schema.returns else None
        if func._schema.is_mutable and can_auto_functionalize(func):
            raise _writes(func)
        outs = list(_outs(func, kwargs))
        if outs:
            _check_dtypes(func, args, kwargs)
        targets = loses_strides(func, args, kwargs)
        if targets:
            with self:
                return write_copies(targets, func, args, kwargs)
        with torch._C.DisableTorchFunction():  # torch asks tensors what they are, many times
            result = retyped(super().__torch_dispatch__(func, plain_types(types), args, kwargs))
        self._repeated.note(func, args, result)
        for target in outs:
            if _is_resized(func, target):
                self._take_shape(target)
        if func in _RESIZES:
            self._take_shape(args[0])
        return result

    def _take_shape(self, resized: FunctionalTensor) -> None:
        """Give a resized wrapper the shape of the tensor that it wraps; after torch's own resize, views of it fail."""
        with no_dispatch():
            resized.data = FunctionalTensor(resized.elem, self)


def _writes(func: Any) -> TraceError:
    """The error for an operator of a third party that writes to lists or optional operands."""
    written = [argument.name for argument in func._schema.arguments if argument.alias_info is not None]
    return TraceError(
        f"{func} at {where()} writes to its operand {', '.join(written)}, and a program holds functional operators "
        "only. Write an operator that returns new tensors, torch.library.custom_op(..., mutates_args=()), in which the "
        "other one writes to a copy."
    )


def _outs(func: Any, kwargs: Mapping[str, Any]) -> Iterator[FunctionalTensor]:
    """The `out=` tensors of a call."""
    for argument in func._schema.arguments if func._schema.is_mutable else ():
        target = kwargs.get(argument.name)
        if argument.kwarg_only and argument.alias_info is not None and isinstance(target, FunctionalTensor):
            yield target


def _check_dtypes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise torch's error for an `out=` of another dtype; functionalization would cast the result instead."""
    given = dict(map_leaves(_on_meta, kwargs))
    for argument in func._schema.arguments:
        if argument.alias_info is not None and isinstance(given.get(argument.name), torch.Tensor):
            given[argument.name] = given[argument.name].new_empty(0)  # torch warns of another shape: see `_is_resized`
    with no_dispatch(), contextlib.suppress(NotImplementedError):
        func(*map_leaves(_on_meta, args), **given)


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _is_resized(func: Any, target: FunctionalTensor) -> bool:
    """Whether an empty `out=` tensor was resized to the result; TraceError for a nonempty one of another shape."""
    torch._sync(target)
    shape = torch._from_functional_tensor(target.elem).shape
    if target.numel():
        check_out(func, shape, target)
    return shape != target.shape
