"""Placements of the parameters and inputs of a call: the usual ones, by the tensors' roles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from proofs.nn_sweep.call import Role, Trial
from proofs.op_sweep.placements import Combination
from proofs.op_sweep.placements import combinations as all_combinations
from spmd.core.mesh import Mesh
from spmd.core.placement import Placement, Replicate, Shard

MOST_OPERATIONS = 500
"""The most operations that are planned for one call, summed over its programs."""

_OTHERS = 2

_Layout = tuple[int | None, int | None]
"""The dims along which parameters and inputs are sharded; None replicates, -1 is the last dim."""

_PARAMETERS: tuple[_Layout, ...] = ((0, None), (-1, None), (0, 0), (-1, -1), (0, -1), (-1, 0))
_ON_TWO_AXES: tuple[tuple[_Layout, _Layout], ...] = (
    ((None, 0), (0, None)),
    ((None, 0), (-1, None)),
    ((None, 0), (None, 0)),
    ((None, 0), (None, -1)),
    ((None, 1), (None, 0)),
    ((0, 0), (-1, None)),
    ((0, None), (0, -1)),
)


def layouts(trial: Trial, mesh: Mesh, most: int, operations: int, turn: int = 0) -> list[Combination]:
    """An evenly spaced sample of the usual placements of all tensors of a call, without duplicates.

    The usual placements are: replicated parameters with inputs sharded along each dim; parameters sharded along the
    first or the last dim, with inputs sharded along none, the first or the last; and two others, a fixed sample.

    Args:
        trial: the call.
        mesh: a mesh of one or two axes.
        most: the size of the sample; it is smaller if the program is long.
        operations: the length of the call's program.
        turn: selects one of several disjoint samples.
    """
    others = itertools.islice(all_combinations(trial.case.tensors, mesh, _OTHERS + 1, partial=False), 1, None)
    found = list(dict.fromkeys(itertools.chain(_usual(trial, mesh), others)))
    most = max(1, min(most, MOST_OPERATIONS // max(operations, 1)))
    step = math.ceil(len(found) / most)
    return found[turn % step :: step]


def _usual(trial: Trial, mesh: Mesh) -> Iterator[Combination]:
    tensors = list(zip(trial.case.tensors, trial.roles, strict=True))
    deepest = max((tensor.ndim for tensor, role in tensors if role is Role.INPUT), default=0)
    alone = (*((None, dim) for dim in range(deepest)), *_PARAMETERS)
    chosen: Sequence[tuple[_Layout, ...]] = [(layout,) for layout in alone] if len(mesh.names) == 1 else _ON_TWO_AXES
    for one_each_axis in chosen:
        yield tuple(tuple(_placement(tensor, role, layout) for layout in one_each_axis) for tensor, role in tensors)


def _placement(tensor: torch.Tensor, role: Role, layout: _Layout) -> Placement:
    parameters, inputs = layout
    dim = parameters if role in (Role.PARAMETER, Role.BUFFER) else inputs
    if dim is None or dim >= tensor.ndim or not tensor.ndim:
        return Replicate()
    return Shard(dim % tensor.ndim)
