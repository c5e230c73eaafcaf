"""Operators that write into the memory of their operands, if nothing but the running program holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import and_
from typing import Any

import torch

from spmd.ir.in_place import GRADIENTS, InPlace, in_place_variant, returned_lists
from spmd.ir.list_operators import FUSED
from spmd.runtime.bindings import callable_of
from spmd.runtime.ownership import Owned, Tensors, is_owned


def call_in_place(op: InPlace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The function that a generated program calls, of which a variable, and nothing else there, holds each operand.

    It takes the operator's arguments, but a list with the first operand in place of that operand itself.

    Args:
        op: the operator.
        args, kwargs: the arguments of a call, as in `callable_of`.
    """
    functional, free = callable_of(op.op, args, kwargs), op.free
    in_place = callable_of(in_place_variant(op.op), args, kwargs)
    owned_lists = [Owned() for _ in range(returned_lists(op.op))] if op.op in FUSED else []

    def single(first: Tensors, *args: Any, **kwargs: Any) -> Any:
        return (in_place if free[0] and is_owned(first)[0] else functional)(first[0], *args, **kwargs)

    def each(tensors: Tensors, *args: Any, **kwargs: Any) -> Any:
        writable = _both(is_owned(tensors), free)
        if not any(writable):
            return functional(tensors, *args, **kwargs)
        _copy_others(tensors, writable, torch.preserve_format)
        in_place(tensors, *args, **kwargs)
        return tensors

    def fused(*lists: Any, **kwargs: Any) -> list[torch.Tensor | None]:
        # The kernels take all tensors of a parameter for memory in one order, without a look at strides.
        allowed = iter(free)
        results: list[torch.Tensor | None] = []
        for position, (tensors, owned) in enumerate(zip(lists, owned_lists, strict=False)):
            if position == GRADIENTS:
                tensors[:] = [tensor.contiguous() for tensor in tensors]
                results += [None] * len(tensors)
                continue
            _copy_others(tensors, _both(owned(tensors), allowed), torch.contiguous_format)
            results += tensors
        in_place(*lists, **kwargs)
        return results

    return fused if op.op in FUSED else each if op.takes_lists else single


def _both(owned: Sequence[bool], free: Iterable[bool]) -> list[bool]:
    """For each tensor whether it is owned and free; takes as many items of `free`."""
    return list(map(and_, owned, free))


def _copy_others(tensors: Tensors, writable: Sequence[bool], memory_format: torch.memory_format) -> None:
    """Replace the tensors that cannot be written to by copies."""
    if all(writable):
        return
    for index, can_write in enumerate(writable):
        if not can_write:
            tensors[index] = tensors[index].clone(memory_format=memory_format)
