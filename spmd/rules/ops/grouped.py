"""Products of matrices in groups, as of the experts of a mixture: `_grouped_mm`, in its four forms.

Where an operand has no dim of groups, its rows (or columns, or what is summed) are those of all groups, one after the
other, and `offs` has the end of each. Torch checks that strides are multiples of 16 bytes, which those of shards need
not be: local matrices are padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd.collectives import shard_offset
from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.ir.call import Call
from spmd.rules.builders import replicated_only, zero_results
from spmd.rules.notation import by_call, factors
from spmd.rules.rule import Axes, Row, Rule, table

_FORMS = {
    (2, 3): "t k, g k j, _ -> t j",
    (2, 2): "i t, t j, _ -> g i j",
    (3, 2): "g i k, k t, _ -> i t",
    (3, 3): "g i k, g k j -> g i j",
}
"""The factors, by the numbers of dims of both operands; `t` is the dim that `offs` splits into groups."""


def _product(left: Tensor, right: Tensor, ends: Tensor | None, rest: dict[str, Any]) -> Tensor:
    """The operator on matrices that are padded to strides of whole 16 bytes."""
    rows, columns = left.shape[-2], right.shape[-1]
    made = torch.ops.aten._grouped_mm.default(_padded(left), _padded(right), ends, **rest)
    return made[..., :rows, :columns]


def _padded(x: Tensor) -> Tensor:
    unit = 16 // x.itemsize
    rows, columns = (-size % unit for size in x.shape[-2:])
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x


def _on_shards(axes: Axes, call: Call, left: Tensor, right: Tensor, offs: Tensor | None = None, **rest: Any) -> Tensor:
    return _product(left, right, offs, rest)


def _of_rows(axes: Axes, call: Call, left: Tensor, right: Tensor, offs: Tensor, **rest: Any) -> Tensor:
    """The product where what `offs` splits is sharded: each rank has parts of groups, perhaps empty ones."""
    split = lambda left, right: left.shape[0] if right.ndim == 3 else right.shape[1 if left.ndim == 3 else 0]  # noqa: E731
    size, length = split(*call.operands[:2]), split(left, right)
    ends = (offs - shard_offset(size, axes).to(offs.device)).clamp(0, length)
    return _product(left, right, ends, rest)


_ROWS: Mapping[tuple[int, int], tuple[Placement, Placement, Placement]] = {
    (2, 3): (Shard(0), Replicate(), Shard(0)),
    (2, 2): (Shard(1), Shard(0), Partial("sum")),
    (3, 2): (Replicate(), Shard(1), Shard(1)),
}
"""The placements of both operands and of the result where what `offs` splits is sharded."""


def _sharded_rows(call: Call) -> Iterator[Row]:
    left, right, result = _ROWS[_dims(call)]
    yield Row((left, right, Replicate()), (result,), _of_rows)


def _of_groups(axes: Axes, call: Call, left: Tensor, right: Tensor, offs: Tensor, **rest: Any) -> Tensor:
    """The product where the groups are sharded: each rank has some, whose rows it brings to the front.

    Elements of the result that belong to groups of other ranks are zero.
    """
    dims = left.ndim, right.ndim
    groups = call.results[0].shape[0] if dims == (2, 2) else (left if dims == (3, 2) else right).shape[0]
    total = left.shape[0] if dims == (2, 3) else right.shape[0] if dims == (2, 2) else right.shape[1]
    start = shard_offset(offs.shape[0], axes).to(offs.device)
    bounds = F.pad(offs, (1, 0)).index_select(0, start + torch.arange(groups + 1, device=offs.device))
    begin, ends = bounds[0], bounds[1:] - bounds[0]
    places = torch.arange(total, device=offs.device)
    to_front = (places + begin) % total
    if dims != (3, 2):
        left = left.index_select(left.ndim - 1 if dims == (2, 2) else 0, to_front)
    if dims != (2, 3):
        right = right.index_select(0 if dims == (2, 2) else 1, to_front)
    made = _product(left, right, ends, rest)
    if dims == (2, 2):
        return made
    dim = 0 if dims == (2, 3) else 1
    own = (places < ends[-1]).unsqueeze(1 - dim)
    return torch.where(own, made, torch.zeros_like(made)).index_select(dim, (places - begin) % total)


def _sharded_groups(call: Call) -> Iterator[Row]:
    dims = _dims(call)
    operands = tuple(Shard(0) if ndim == 3 else Replicate() for ndim in dims)
    yield Row((*operands, Replicate()), (Shard(0) if dims == (2, 2) else Partial("sum"),), _of_groups)


def _dims(call: Call) -> tuple[int, int]:
    return call.operands[0].ndim, call.operands[1].ndim


def _grouped(call: Call) -> Rule:
    if call.argument("bias", None) is not None:  # torch raises
        return replicated_only()
    pattern, every = _FORMS[_dims(call)], _dims(call) == (3, 3)
    rows = () if every else (_sharded_rows, _sharded_groups)
    bodies = {name: _on_shards for name in "ijkg" if name in pattern}
    summed, fixed = "k" if "k" in pattern else "", "" if every else "g t"
    return factors(pattern, *rows, sum=summed, replicate=fixed, bodies=bodies)


GROUPED = table({"_grouped_mm": by_call(_grouped, empty=zero_results)})
