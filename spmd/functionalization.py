"""In-place operators as functional ones, where torch's own functionalization is incomplete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._mode_utils import no_dispatch

from spmd.errors import TraceError
from spmd.foreach import list_body
from spmd.nested_tracers import refuse_recording
from spmd.overlapping import RepeatedViews
from spmd.recorder import where

aten = torch.ops.aten

_SAFE = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}
"""Views that torch does not track as such: a write to them is one to what they are of."""

# Their meta kernel chooses an overload by trying: what does not fit is printed, which forward mode cannot do there.
_INTERPOLATIONS = frozenset({aten.lerp_.Scalar, aten.lerp_.Tensor})


class Functionalization(FunctionalTensorMode):
    """Functionalization without what needs values: torch.linalg's checks for failures (a singular matrix has no inverse
    that is finite, and that is what comes out), and numbers of a list operator that come as one tensor.

    Operators that torch composes of others are taken apart here and not below: they may write to tensors of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeated = RepeatedViews()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._linalg_check_errors.default:
            return None
        refuse_recording()
        if func is aten.bernoulli_.float and not args[0].is_contiguous():
            with self:
                return args[0].copy_(_drawn_in_memory_order(*args))
        func = _SAFE.get(func, func)
        if func in _INTERPOLATIONS:
            with self:
                return args[0].copy_(torch.lerp(*args))
        if func._schema.is_mutable:
            with self:
                written = self._repeated.write(func, args, kwargs or {})
            if written is not None:
                return written if func._schema.returns else None
        body = list_body(func) if func._schema.is_mutable else None
        if func not in FunctionalTensor.metadata_fns and func._can_decompose():
            body = func.decompose
        if body is not None:
            with self:
                return body(*args, **kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._repeated.note(func, args, result)
        for target in _outs(func, kwargs or {}):
            _check_resized(func, target)
        return result


def _outs(func: Any, kwargs: Mapping[str, Any]) -> Iterator[FunctionalTensor]:
    """The tensors that an operator is given for its results."""
    for argument in func._schema.arguments if func._schema.is_mutable else ():
        target = kwargs.get(argument.name)
        if argument.kwarg_only and argument.alias_info is not None and isinstance(target, FunctionalTensor):
            yield target


def _check_resized(func: Any, target: FunctionalTensor) -> None:
    """An empty tensor takes the shape of the result that is written to it; TraceError for any other."""
    torch._sync(target)
    shape = torch._from_functional_tensor(target.elem).shape
    if shape == target.shape:
        return
    if target.numel():
        raise TraceError(
            f"{func} at {where()} has a result of shape {list(shape)} for out= of shape {list(target.shape)}. Give it "
            "a tensor of the result's shape, or an empty one: torch.empty(0)."
        )
    with no_dispatch():
        target.resize_(shape)


def _drawn_in_memory_order(like: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    """What `like.bernoulli_(p)` draws; its functional form, unlike those of other draws, knows no strides."""
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    drawn = like.new_empty([like.shape[dim] for dim in order]).bernoulli_(p)
    return drawn.permute([order.index(dim) for dim in range(like.ndim)])
