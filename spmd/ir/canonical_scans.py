"""Operators of canonical programs: scans from the end of a dim, and the gradients of running extremes.

No rank calls them: their rules have local implementations by torch's operators (`spmd.rules.ops.scan`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_LIBRARY = torch.library.Library("spmd_rules", "FRAGMENT")


def _reversed(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Define the scan `op` of a dim from its end to its start."""
    name = f"reverse_{op.overloadpacket.__name__}"
    _LIBRARY.define(name + str(op._schema).removeprefix(op._schema.name))

    def kernel(x: Tensor, dim: int, **options: Any) -> Tensor:
        return aten.flip.default(op(aten.flip.default(x, [dim]), dim, **options), [dim])  # type: ignore[no-any-return]

    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    return getattr(torch.ops.spmd_rules, name).default  # type: ignore[no-any-return]


REVERSED: Mapping[torch._ops.OpOverload, torch._ops.OpOverload] = MappingProxyType({
    op: _reversed(op) for op in (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)
})  # fmt: skip
"""For scans from the start of a dim, those from its end, as the argument `reverse` of JAX's `lax.cumsum`."""

_LIBRARY.define("add_at_extremes(Tensor grad, int dim, Tensor index) -> Tensor")


def _add_at_extremes(grad: Tensor, dim: int, index: Tensor) -> Tensor:
    return aten.scatter_add.default(torch.zeros_like(grad), dim, index, grad)  # type: ignore[no-any-return]


_LIBRARY.impl("add_at_extremes", _add_at_extremes, "CompositeExplicitAutograd")

ADD_AT_EXTREMES: torch._ops.OpOverload = torch.ops.spmd_rules.add_at_extremes.default
"""`add_at_extremes(grad, dim, index)`: the gradient of `cummax` or `cummin` along `dim`, with the positions `index`."""
