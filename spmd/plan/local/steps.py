"""The steps of a redistribution on a rank's local tensors, over physical dims where possible.

A physical dim is a dim of the torch tensor. Planning splits its size into *atoms*, which can be sharded one by one:
every atom is one logical dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from spmd.collectives.step import Step
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.spec import DTensorSpec, TensorMeta, chunk_bounds
from spmd.plan.data.layout import Layout
from spmd.rules.strategy import LogicalShape


@attrs.frozen
class LocalStep:
    """One step of a redistribution on one rank's local tensor.

    Args:
        step: the step, over the dims of `view`.
        view: the shape to which the local tensor is reshaped before the step.
        shape: the local tensor's physical shape after the step.
    """

    step: Step
    view: tuple[int, ...]
    shape: tuple[int, ...]


def localize_step(step: Step, atoms: LogicalShape, coordinate: Coordinate) -> LocalStep:
    """Express a step over physical dims where possible, else over logical dims.

    Mesh axes that the step does not involve are folded into the sizes: the rank's shard along them counts as the full
    tensor. Then the step can shard a physical dim instead of its leading atom if the chunks are equal: equal chunks of
    `b` in `[b, s]` are equal chunks of `b * s`.

    Args:
        step: a step over logical dims.
        atoms: the sizes of the atoms of each physical dim.
        coordinate: the mesh coordinate of the rank.
    """
    before, after = Layout(step.source, atoms), Layout(step.target, atoms)
    folded = _fold(step, coordinate)
    if folded is None or not all(_merges(group, step.source.mesh) for group in _groups(folded, atoms)):
        return LocalStep(step, before.logical_shape(coordinate), after.shape(coordinate))
    merged = [_merge(group) for group in _groups(folded, atoms)]
    meta = TensorMeta(tuple(dim.size for dim in merged), step.source.meta.dtype)
    source = DTensorSpec(step.source.mesh, tuple(dim.source for dim in merged), step.source.partial, meta)
    target = DTensorSpec(step.target.mesh, tuple(dim.target for dim in merged), step.target.partial, meta)
    owner = [index for index, group in enumerate(atoms) for _ in group]
    physical = attrs.evolve(step, source=source, target=target, dims=tuple(owner[dim] for dim in step.dims))
    return LocalStep(physical, before.shape(coordinate), after.shape(coordinate))


@attrs.frozen
class _Dim:
    """A dim of a step: its size, and the axes involved in the step that shard it before and after."""

    size: int
    source: tuple[str, ...]
    target: tuple[str, ...]


def _fold(step: Step, coordinate: Coordinate) -> list[_Dim] | None:
    """The step's dims with uninvolved axes folded into the sizes; None if such an axis is minor to an involved one."""
    mesh, folded = step.source.mesh, []
    for size, *dims in zip(step.source.meta.shape, step.source.dims, step.target.dims, strict=True):
        source, target = (tuple(axis for axis in axes if mesh.axis_size(axis) > 1) for axes in dims)
        still = tuple(axis for axis in source if axis not in step.axes)
        if source[: len(still)] != still or target[: len(still)] != still:
            return None
        counts = [mesh.axis_size(axis) for axis in still]
        start, stop = chunk_bounds(size, counts, [coordinate[mesh.axis_position(axis)] for axis in still])
        folded.append(_Dim(stop - start, source[len(still) :], target[len(still) :]))
    return folded


def _groups(dims: Sequence[_Dim], atoms: LogicalShape) -> list[list[_Dim]]:
    remaining = iter(dims)
    return [[next(remaining) for _ in group] for group in atoms]


def _merges(group: list[_Dim], mesh: Mesh) -> bool:
    """Whether the step can treat a physical dim as one dim: it shards only the leading atom, and evenly."""
    involved = [index for index, dim in enumerate(group) if dim.source or dim.target]
    if not involved:
        return True
    index, inner = involved[0], math.prod(dim.size for dim in group[involved[0] + 1 :])
    leads = len(involved) == 1 and all(dim.size == 1 for dim in group[:index])
    dim = group[index]
    even = dim.size % mesh.axis_size(dim.source) == 0 and dim.size % mesh.axis_size(dim.target) == 0
    return leads and (even or inner == 1)


def _merge(group: list[_Dim]) -> _Dim:
    source = next((dim.source for dim in group if dim.source), ())
    target = next((dim.target for dim in group if dim.target), ())
    return _Dim(math.prod(dim.size for dim in group), source, target)
