"""Writes whose operands share memory with what is written to: torch does not define their results, nor refuse all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmd.ir.graph import iterate_leaves


def check_overlap(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that an operator reads none of the elements that it writes to, but as the same tensor.

    Raises:
        RuntimeError: it does.
    """
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for number, argument in enumerate(op._schema.arguments):
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(x for x in iterate_leaves(given) if isinstance(x, torch.Tensor))
    for target in written:
        if any(_overlap(target, operand) for operand in read):
            raise RuntimeError(f"{op} writes to elements that it reads as another tensor")


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share elements, and are not the same."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata or _place(one) == _place(other):
        return False
    return bool(torch.isin(_elements(one), _elements(other)).any())


def _place(x: torch.Tensor) -> tuple[Any, ...]:
    return x.storage_offset(), x.shape, x.stride()


def _elements(x: torch.Tensor) -> torch.Tensor:
    """The offsets of the elements of a tensor in its storage, in bytes."""
    span = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return torch.arange(max(int(span), 1)).as_strided(x.shape, x.stride(), x.storage_offset()) * x.element_size()
