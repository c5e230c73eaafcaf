"""The steps of a redistribution that may follow a spec: each is one primitive.

Chunks are nested, so only the innermost axes of a dim can change directly. An outer axis changes after the axes inside
it are gathered or moved away, or by a permute if the chunks are equal. A step puts an axis only where the goal has it,
which keeps the search small for any number of dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import attrs
import torch

from spmd.collectives.block_exchange import BlockExchange
from spmd.collectives.precision import summed_in
from spmd.collectives.step import Step, changed_axes
from spmd.core.spec import Dims, DTensorSpec
from spmd.ir.comm import StepKind


def next_steps(here: DTensorSpec, goal: DTensorSpec, reduce_dtype: torch.dtype | None = None) -> Iterator[Step]:
    """The steps that may come next on a way from a spec to another; neither has axes of size 1.

    Sums run in `reduce_dtype`, as by `summed_in`.
    """
    yield from _slices(here, goal)
    yield from _reductions(here, goal, reduce_dtype)
    yield from _exchanges(here, goal)
    yield from _permutations(here, goal)
    yield from _gathers(here)
    yield from _partials(here, goal)


def eager_steps(here: DTensorSpec, goal: DTensorSpec) -> Iterator[Step]:
    """The steps outside of a program: those of `next_steps`, and reduce_scatters to any dim."""
    yield from next_steps(here, goal)
    for chosen in _subsets(tuple(axis for axis, _ in here.partial)):
        for dim, held in enumerate(here.dims):
            result = _with_dims(_reduced(here, chosen), (dim, held + chosen))
            yield Step(StepKind.REDUCE_SCATTER, chosen, here, result, (dim,), here.partial[0][1])


def exchanges(here: DTensorSpec, goal: DTensorSpec) -> Iterator[BlockExchange]:
    """The exchanges outside of a program: to the goal, or to what local steps make partial, so that replicas share."""
    if here.mesh.size <= MOST_RANKS:
        yield from (BlockExchange(here, spec) for spec in dict.fromkeys((goal, goal.complete)))


MOST_RANKS = 256
"""The ranks of a mesh up to which an exchange is considered, because planning one takes time for each pair of them."""


def _slices(here: DTensorSpec, goal: DTensorSpec) -> Iterator[Step]:
    used = _used(here)
    for dim, wanted in enumerate(goal.dims):
        for run in _runs(wanted):
            if used.isdisjoint(run):
                yield Step(StepKind.SHARD, run, here, _with_dims(here, (dim, here.dims[dim] + run)), (dim,))


def _reductions(here: DTensorSpec, goal: DTensorSpec, reduce_dtype: torch.dtype | None) -> Iterator[Step]:
    if not here.partial:
        return
    op = here.partial[0][1]
    wide = summed_in(here.meta.dtype, op, reduce_dtype)
    dtype = None if wide == here.meta.dtype else wide
    axes = tuple(axis for axis, _ in here.partial)
    for dim, wanted in enumerate(goal.dims):
        for run in _runs(wanted):
            if set(run) <= set(axes):
                result = _with_dims(_reduced(here, run), (dim, here.dims[dim] + run))
                yield Step(StepKind.REDUCE_SCATTER, run, here, result, (dim,), op, dtype)
    for chosen in _subsets(axes):
        yield Step(StepKind.ALL_REDUCE, chosen, here, _reduced(here, chosen), (), op, dtype)


def _exchanges(here: DTensorSpec, goal: DTensorSpec) -> Iterator[Step]:
    for concat, held in enumerate(here.dims):
        for split, wanted in enumerate(goal.dims):
            if split == concat:
                continue
            for run in _runs(wanted):
                if held[-len(run) :] == run:
                    changes = (concat, held[: -len(run)]), (split, here.dims[split] + run)
                    yield Step(StepKind.ALL_TO_ALL, run, here, _with_dims(here, *changes), (split, concat))


def _permutations(here: DTensorSpec, goal: DTensorSpec) -> Iterator[Step]:
    for dim, (held, wanted) in enumerate(zip(here.dims, goal.dims, strict=True)):
        order = {axis: position for position, axis in enumerate(wanted)}
        inner = tuple(axis for axis in held if axis not in order)
        reordered = tuple(sorted((axis for axis in held if axis in order), key=order.__getitem__)) + inner
        yield from _permutation(here, (*here.dims[:dim], reordered, *here.dims[dim + 1 :]))
    yield from _permutation(here, goal.dims)


def _permutation(here: DTensorSpec, dims: Dims) -> Iterator[Step]:
    """The permute to other axes of all dims, if both split the tensor into the same chunks, all equal."""
    mesh, changed = here.mesh, tuple(zip(here.dims, dims, strict=True))
    for size, (before, after) in zip(here.meta.shape, changed, strict=True):
        if before != after and (mesh.axis_size(before) != mesh.axis_size(after) or size % mesh.axis_size(before)):
            return
    middles = [changed_axes(mesh, before, after) for before, after in changed]
    moved = {axis for before, after in middles for axis in before + after}
    if moved and moved.isdisjoint(axis for axis, _ in here.partial):
        axes = tuple(axis for axis in mesh.names if axis in moved)
        yield Step(StepKind.PERMUTE, axes, here, attrs.evolve(here, dims=dims))


def _gathers(here: DTensorSpec) -> Iterator[Step]:
    for dim, held in enumerate(here.dims):
        for start in range(len(held)):
            yield Step(StepKind.ALL_GATHER, held[start:], here, _with_dims(here, (dim, held[:start])), (dim,))


def _partials(here: DTensorSpec, goal: DTensorSpec) -> Iterator[Step]:
    axes = tuple(axis for axis, _ in goal.partial if axis not in _used(here))
    if axes and set(here.partial) <= set(goal.partial):
        op = goal.partial[0][1]
        result = attrs.evolve(here, partial=(*here.partial, *((axis, op) for axis in axes)))
        yield Step(StepKind.TO_PARTIAL, axes, here, result, (), op)


def _runs(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The contiguous, non-empty parts of a tuple, longest first."""
    for length in range(len(axes), 0, -1):
        for start in range(len(axes) - length + 1):
            yield axes[start : start + length]


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for length in range(len(axes), 0, -1):
        yield from itertools.combinations(axes, length)


def _with_dims(spec: DTensorSpec, *changes: tuple[int, tuple[str, ...]]) -> DTensorSpec:
    """The spec with other axes on some dims; `changes` are pairs of dim and axes."""
    axes = dict(changes)
    return attrs.evolve(spec, dims=tuple(axes.get(dim, old) for dim, old in enumerate(spec.dims)))


def _reduced(spec: DTensorSpec, axes: Sequence[str]) -> DTensorSpec:
    """The spec after a reduction over `axes`."""
    return attrs.evolve(spec, partial=tuple(item for item in spec.partial if item[0] not in axes))


def _used(spec: DTensorSpec) -> frozenset[str]:
    """The axes over which the value is not replicated."""
    return frozenset(itertools.chain(*spec.dims, (axis for axis, _ in spec.partial)))
