"""Operators that write into the memory of their operands, if nothing but the running program holds it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from spmd.ir.in_place import GRADIENTS, InPlace, in_place_variant, returned_lists
from spmd.ir.list_operators import FUSED
from spmd.runtime.bindings import callable_of

Tensors = list[torch.Tensor]


def call_in_place(op: InPlace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The function that a generated program calls, of which a variable, and nothing else there, holds each operand.

    It takes the operator's arguments, but a list with the first operand in place of that operand itself.

    Args:
        op: the operator.
        args, kwargs: the arguments of a call, as in `callable_of`.
    """
    functional, free = callable_of(op.op, args, kwargs), op.free
    in_place = callable_of(in_place_variant(op.op), args, kwargs)

    def single(first: Tensors, *args: Any, **kwargs: Any) -> Any:
        return (in_place if free[0] and is_owned(first, 0) else functional)(first[0], *args, **kwargs)

    def each(tensors: Tensors, *args: Any, **kwargs: Any) -> Any:
        owned = [allowed and is_owned(tensors, index) for index, allowed in enumerate(free)]
        if not any(owned):
            return functional(tensors, *args, **kwargs)
        for index, is_own in enumerate(owned):
            if not is_own:
                tensors[index] = tensors[index].clone()
        in_place(tensors, *args, **kwargs)
        return tensors

    def fused(*lists: Any, **kwargs: Any) -> list[torch.Tensor | None]:
        # The kernels take all tensors of a parameter for memory in one order, without a look at strides.
        allowed = iter(free)
        results: list[torch.Tensor | None] = []
        for position, tensors in enumerate(lists[: returned_lists(op.op)]):
            if position == GRADIENTS:
                tensors[:] = [tensor.contiguous() for tensor in tensors]
                results += [None] * len(tensors)
                continue
            for index in range(len(tensors)):
                if not (next(allowed) and is_owned(tensors, index)):
                    tensors[index] = tensors[index].clone(memory_format=torch.contiguous_format)
            results += tensors
        in_place(*lists, **kwargs)
        return results

    return fused if op.op in FUSED else each if op.takes_lists else single


_REFERENCES = 3
"""To a tensor that nobody else holds: of the program's variable, of the list, and of the argument of `getrefcount`."""

_storage_uses: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]


def is_owned(tensors: Tensors, index: int) -> bool:
    """Whether only one variable and this list hold a tensor, which is contiguous and alone in its whole memory."""
    if sys.getrefcount(tensors[index]) != _REFERENCES or tensors[index]._use_count() != 1:  # type: ignore[attr-defined]
        return False
    tensor = tensors[index]
    memory = tensor.untyped_storage()
    return (
        _storage_uses(memory._cdata) == 2  # of the tensor, and of `memory`
        and memory.nbytes() == tensor.nbytes
        and tensor.is_contiguous()
        and memory.resizable()  # else it is not torch's, but numpy's, for one
        and (tensor.is_cuda or not memory.is_shared())  # with other processes; for CUDA, torch always says so
    )
