"""Reductions whose parts merge by a small state: each rank reduces its shard, and one number a result is communicated.

A merge is exact where sums are: it adds in another order than one device. States that no collective reduces go to all
ranks, or, of each line, to the one that gets its result: the result is sharded along another dim than the operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from spmd.collectives import all_gather, all_to_all, axis_size, pmax, psum
from spmd.core.placement import Replicate, Shard, neutral_element
from spmd.ir.call import Call
from spmd.rules.builders import argument_dims
from spmd.rules.notation import Rows
from spmd.rules.rule import Axes, Row

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


Join: TypeAlias = Callable[[Tensor, int], Tensor]
"""Joins all ranks' states, of equal shapes, along a dim."""


@attrs.frozen
class Merged:
    """A local implementation that merges all ranks' states of an operand whose dim is sharded.

    Args:
        run: `run(axes, call, join, x)` computes this rank's state, joins those of all ranks, and finishes.
        to: the dim of the operand of which each rank merges its shard; None if all merge everything.
    """

    run: Callable[..., Any]
    to: int | None = None

    def __call__(self, axes: Axes, call: Call, x: Tensor, *_: Any, **__: Any) -> Any:
        """Run with states that are gathered, or exchanged."""
        return self.run(axes, call, partial(self._joined, axes, call), x)

    def _joined(self, axes: Axes, call: Call, state: Tensor, dim: int) -> Tensor:
        if self.to is None:
            return all_gather(state.contiguous(), axes, axis=dim, tiled=True)
        sizes = call.results[0].shape[_result_dim(call, self.to)], state.shape[dim] * axis_size(axes)
        return all_to_all(state.contiguous(), axes, self.to, dim, tiled=True, sizes=sizes)


def _result_dim(call: Call, dim: int) -> int:
    """The result's dim that is `dim`, not the reduced one, of the operand."""
    (operand,), result = call.operands, call.results[0]
    return dim - (result.ndim < operand.ndim and dim > int(call.argument("dim")) % operand.ndim)


def merged_by_all(run: Callable[..., Any]) -> Rows:
    """The strategy in which the argument `dim` is sharded and all ranks merge all states; `run` as in `Merged`."""

    def rows(call: Call) -> Iterator[Row]:
        for dim in argument_dims(call, "dim", call.operands[0].ndim):
            yield Row((Shard(dim),), (Replicate(),) * len(call.results), Merged(run))

    return rows


def merged_by_line(run: Callable[..., Any]) -> Rows:
    """The strategies in which the argument `dim` is sharded, and another dim of results; `run` as in `Merged`."""

    def rows(call: Call) -> Iterator[Row]:
        (x,) = call.operands
        for dim in argument_dims(call, "dim", x.ndim):
            for to in range(x.ndim):
                if to != dim and x.shape[to] > 1:
                    results = (Shard(_result_dim(call, to)),) * len(call.results)
                    yield Row((Shard(dim),), results, Merged(run, to))

    return rows


def prod(axes: Axes, call: Call, join: Join, x: Tensor) -> Tensor:
    """Merge by the product of the ranks' products."""
    (result,) = call.results
    first, *rest = argument_dims(call, "dim", x.ndim) if call.op is aten.prod.dim_int else range(x.ndim)
    part = x.to(result.dtype)
    for dim in (first, *rest):
        part = part.prod(dim, keepdim=True)
    return join(part, first).prod(first).reshape(result.shape)
