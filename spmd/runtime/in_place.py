"""Operators that write into the memory of their operands, if nothing but the running program holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount
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
        return (in_place if free[0] and is_owned(first)[0] else functional)(first[0], *args, **kwargs)

    def each(tensors: Tensors, *args: Any, **kwargs: Any) -> Any:
        owned = _writable(tensors, free)
        if not any(owned):
            return functional(tensors, *args, **kwargs)
        _copy_others(tensors, owned, torch.preserve_format)
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
            _copy_others(tensors, _writable(tensors, allowed), torch.contiguous_format)
            results += tensors
        in_place(*lists, **kwargs)
        return results

    return fused if op.op in FUSED else each if op.takes_lists else single


def _writable(tensors: Tensors, free: Iterable[bool]) -> list[bool]:
    """For each tensor whether it can be written to; takes as many items of `free`."""
    return [allowed and is_own for is_own, allowed in zip(is_owned(tensors), free, strict=False)]


def _copy_others(tensors: Tensors, writable: Sequence[bool], memory_format: torch.memory_format) -> None:
    """Replace the tensors that cannot be written to by copies."""
    for index, can_write in enumerate(writable):
        if not can_write:
            tensors[index] = tensors[index].clone(memory_format=memory_format)


_REFERENCES = 4
"""To a tensor that nobody else holds: of the program's variable, of the list, of the variable of the loop over it, and
of the argument of `getrefcount`.
"""

_storage_uses: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]


def is_owned(tensors: Tensors) -> list[bool]:
    """For each tensor, whether only one variable and the list hold it, and it is contiguous and alone in its memory."""
    found = []
    for tensor in tensors:
        if getrefcount(tensor) != _REFERENCES or tensor._use_count() != 1:  # type: ignore[attr-defined]
            found.append(False)
            continue
        memory = tensor.untyped_storage()
        found.append(
            _storage_uses(memory._cdata) == 2  # of the tensor, and of `memory`
            and memory.nbytes() == tensor.nbytes
            and tensor.is_contiguous()
            and memory.resizable()  # else it is not torch's, but numpy's, for one
            and (not memory.is_shared() or tensor.is_cuda)  # with other processes; for CUDA, torch always says so
        )
    return found
