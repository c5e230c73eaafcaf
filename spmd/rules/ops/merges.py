"""Reductions whose parts merge by a small state: each rank reduces its shard, and one number a result is communicated.

A merge is exact where sums are: it adds in another order than one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd.collectives import all_gather, pmax, psum
from spmd.core.placement import neutral_element
from spmd.ir.call import Call
from spmd.rules.builders import argument_dims
from spmd.rules.rule import Axes

aten = torch.ops.aten


def widen(x: Tensor) -> Tensor:
    """`x` in the precision in which torch's kernels accumulate: float32 for float16 and bfloat16."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def row_max(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The maximum over nonnegative `dims`, which stay with length 1; over no elements, the dtype's smallest value."""
    if all(x.shape[dim] for dim in dims):
        return x.amax(dims, keepdim=True)
    return x.new_full([1 if dim in dims else size for dim, size in enumerate(x.shape)], neutral_element("max", x.dtype))


def logsumexp(axes: Axes, call: Call, x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """Merge by the largest value and the sum of exponentials of distances from it."""
    over = argument_dims(call, "dim", x.ndim)
    largest = pmax(row_max(x, over), axes)
    # A row of infinities has no finite shift: exp(x - inf) would be nan.
    shift = torch.where(largest.isfinite(), largest, torch.zeros_like(largest))
    total = psum((x - shift).exp().sum(over, keepdim=True), axes)
    result = total.log() + shift
    return result if keepdim else result.squeeze(over)


def vector_norm(axes: Axes, call: Call, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Merge by the sum of the ranks' norms to the power of the order, which is neither 0 nor infinite."""
    (result,) = call.results
    order, over = call.argument("ord"), argument_dims(call, "dim", x.ndim)
    dtype = call.argument("dtype") or x.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if all(x.shape[dim] for dim in over):
        part = aten.linalg_vector_norm.default(x, order, over, call.argument("keepdim"), dtype=wide).pow(order)
    else:
        part = x.new_zeros(result.shape, dtype=wide.to_real())
    return psum(part, axes).pow(1 / order).to(result.dtype)


def prod(axes: Axes, call: Call, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Merge by the product of the ranks' products."""
    (result,) = call.results
    over = argument_dims(call, "dim", x.ndim) if call.op is aten.prod.dim_int else range(x.ndim)
    part = x.to(result.dtype)
    for dim in over:
        part = part.prod(dim, keepdim=True)
    every = all_gather(part.unsqueeze(0).contiguous(), axes, axis=0, tiled=True)
    return every.prod(0).reshape(result.shape)
