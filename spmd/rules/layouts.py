"""Which operators read their operands by stride, and what memory layout they need.

Strides are no part of a program: planning and rules never see them, and a kernel gives the same values for every layout
of its operands. These kernels do not: given other strides they refuse, or read other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType

import torch

OpOverload = torch._ops.OpOverload


class Need(Enum):
    """What the kernels of an operator need of the memory layout of their operands."""

    ANY = "any"
    ROWS = "rows"  # the last dim has stride 1
    CONTIGUOUS = "contiguous"


SENSITIVE: Mapping[str, Need] = MappingProxyType(
    {
        "_scaled_dot_product_flash_attention_for_cpu": Need.ROWS,
        "_scaled_dot_product_flash_attention_for_cpu_backward": Need.ROWS,
        "_scaled_dot_product_flash_attention": Need.ROWS,
        "_scaled_dot_product_efficient_attention": Need.ROWS,
        "_scaled_dot_product_cudnn_attention": Need.ROWS,
        "mkldnn_rnn_layer": Need.CONTIGUOUS,
        "mkldnn_rnn_layer_backward": Need.CONTIGUOUS,
        "native_group_norm": Need.CONTIGUOUS,
        "native_group_norm_backward": Need.CONTIGUOUS,
        "view.dtype": Need.CONTIGUOUS,
        "view_as_complex": Need.CONTIGUOUS,
    }
)
"""By operator; all others of torch take any layout."""


def need(op: object) -> Need:
    """The memory layout that the operands of an operator need; operators that are not torch's need contiguous ones.

    >>> need(torch.ops.aten.mm.default), need(torch.ops.aten.view_as_complex.default)
    (<Need.ANY: 'any'>, <Need.CONTIGUOUS: 'contiguous'>)
    """
    if not isinstance(op, OpOverload) or op.namespace in _ANY_LAYOUT:
        return Need.ANY
    if op.namespace != "aten":
        return Need.CONTIGUOUS
    return SENSITIVE.get(str(op).removeprefix("aten.").removesuffix(".default"), Need.ANY)


_ANY_LAYOUT = frozenset({"spmd", "prims"})
"""Namespaces whose operators take any layout: our own collectives, and torch's primitives."""


def has_layout(x: torch.Tensor, needed: Need) -> bool:
    """Whether a tensor lies in memory as is needed."""
    if needed is Need.ROWS:
        return x.ndim == 0 or x.stride(-1) == 1
    return needed is Need.ANY or x.is_contiguous()


def with_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its last dim has stride 1, else a contiguous copy."""
    return x if has_layout(x, Need.ROWS) else x.contiguous()


LAYOUT_COPIES: Mapping[Need, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {Need.ROWS: with_rows, Need.CONTIGUOUS: torch.ops.aten.contiguous.default}
)
"""What gives a tensor the layout that is needed, without a copy where it has it."""
