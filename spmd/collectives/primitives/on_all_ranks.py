"""Parts of collectives as pure functions over all ranks of a group.

Reductions run in rank order, so results are deterministic. Tensors are read-only, because ranks may share one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from spmd.collectives.primitive import Arguments
from spmd.collectives.transport.group import Group
from spmd.errors import DivergenceError

_COMBINE: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
)


def reduced_calls(op: str, calls: Sequence[Arguments]) -> Tensor:
    """The reduction of the tensors of calls; a DivergenceError if shapes differ, because torch would broadcast."""
    tensors = [arguments[0] for arguments in calls]
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) != 1:
        raise DivergenceError(
            f"Ranks hold different shapes in one collective: {sorted(map(tuple, shapes))}. Expected equal ones."
        )
    return _reduce(op, tensors)


def _reduce(op: str, tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0].contiguous()
    combine = _COMBINE[op]
    total = combine(tensors[0], tensors[1])
    for tensor in tensors[2:]:
        combine(total, tensor, out=total)
    return total.contiguous()


def chunks_of(group: Group, whole: Tensor, dim: int) -> list[Tensor]:
    """The chunk of `dim` for every rank of the group; a view if that is contiguous."""
    return [piece.contiguous() for piece in whole.split(group.lengths(whole.shape[dim]), dim)]
