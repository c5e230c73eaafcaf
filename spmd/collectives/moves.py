"""The steps of a redistribution that may follow a spec: each is one primitive.

Chunks are nested, so only the innermost axes of a dim can change directly. An outer axis changes after the axes inside
it are gathered or moved away, or by a permute if the chunks are equal. A step puts an axis only where the goal has it,
which keeps the search small for any number of dims; or else, in any order, the axes that `anywhere` has for each dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

import attrs
import torch

from spmd.collectives.block_exchange import BlockExchange
from spmd.collectives.precision import summed_in
from spmd.collectives.primitives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, SHARD, TO_PARTIAL
from spmd.collectives.primitives.permute import permuted_axes
from spmd.collectives.step import Step
from spmd.core.spec import Dims, DTensorSpec, Reductions

_T = TypeVar("_T")

Runs: TypeAlias = Sequence[Sequence[tuple[str, ...]]]
"""For each dim the axes that a step may put on it."""


def next_steps(
    here: DTensorSpec, goal: DTensorSpec, reduce_dtype: torch.dtype | None = None, anywhere: Dims = ()
) -> Iterator[Step]:
    """The steps that may come next on a way from a spec to another; neither has axes of size 1.

    Sums run in `reduce_dtype`, as by `summed_in`. A step puts axes where the goal has them, or if `anywhere` is not
    empty, those of its axes for a dim, in any order.
    """
    runs = [_orders(axes) for axes in anywhere] if anywhere else [tuple(_runs(axes)) for axes in goal.dims]
    yield from _slices(here, runs)
    yield from _reductions(here, runs, reduce_dtype)
    yield from _exchanges(here, runs)
    yield from _permutations(here, goal)
    yield from _relabelings(here, anywhere)
    yield from _gathers(here)
    yield from _partials(here, goal)


def exchanges(here: DTensorSpec, goal: DTensorSpec, anywhere: Dims = ()) -> Iterator[BlockExchange]:
    """The exchanges outside of a program: to the goal, or to what local steps make partial, so that replicas share.

    On meshes of few ranks also to what an all_gather over some axes of `anywhere`, or an all_reduce, brings there.
    """
    targets = [goal, goal.complete]
    if here.mesh.size <= FEW_RANKS:
        targets += [step.target for step in _slices(goal.complete, [_orders(axes) for axes in anywhere])]
        pending = [item for item in here.partial if item[0] not in _used(goal)]
        targets += [attrs.evolve(goal, partial=kept) for kept in _subsets(pending)]
    if here.mesh.size <= MOST_RANKS:
        yield from (BlockExchange(here, spec) for spec in dict.fromkeys(targets))


MOST_RANKS, FEW_RANKS = 256, 16
"""The ranks up to which an exchange is considered, and many; because planning one takes time for each pair of ranks."""


def _slices(here: DTensorSpec, runs: Runs) -> Iterator[Step]:
    used = _used(here)
    for dim, chosen in enumerate(runs):
        for run in chosen:
            if used.isdisjoint(run):
                yield Step(SHARD, run, here, _with_dims(here, (dim, here.dims[dim] + run)), (dim,))


def _reductions(here: DTensorSpec, runs: Runs, reduce_dtype: torch.dtype | None) -> Iterator[Step]:
    if not here.partial:
        return
    op = here.partial[0][1]
    wide = summed_in(here.meta.dtype, op, reduce_dtype)
    dtype = None if wide == here.meta.dtype else wide
    axes = tuple(axis for axis, _ in here.partial)
    for dim, wanted in enumerate(runs):
        for run in wanted:
            if set(run) <= set(axes):
                result = _with_dims(_reduced(here, run), (dim, here.dims[dim] + run))
                yield Step(REDUCE_SCATTER, run, here, result, (dim,), op, dtype)
    for chosen in _subsets(axes):
        yield Step(ALL_REDUCE, chosen, here, _reduced(here, chosen), (), op, dtype)


def _exchanges(here: DTensorSpec, runs: Runs) -> Iterator[Step]:
    for concat, held in enumerate(here.dims):
        for split, wanted in enumerate(runs):
            if split == concat:
                continue
            for run in wanted:
                if held[-len(run) :] == run:
                    changes = (concat, held[: -len(run)]), (split, here.dims[split] + run)
                    yield Step(ALL_TO_ALL, run, here, _with_dims(here, *changes), (split, concat))


def _permutations(here: DTensorSpec, goal: DTensorSpec) -> Iterator[Step]:
    for dim, (held, wanted) in enumerate(zip(here.dims, goal.dims, strict=True)):
        order = {axis: position for position, axis in enumerate(wanted)}
        inner = tuple(axis for axis in held if axis not in order)
        reordered = tuple(sorted((axis for axis in held if axis in order), key=order.__getitem__)) + inner
        yield from _permutation(here, (*here.dims[:dim], reordered, *here.dims[dim + 1 :]), here.partial)
    yield from _permutation(here, goal.dims, here.partial)
    if {op for _, op in here.partial} == {op for _, op in goal.partial} and here.partial != goal.partial:
        yield from _permutation(here, goal.dims, goal.partial)


def _relabelings(here: DTensorSpec, anywhere: Dims) -> Iterator[Step]:
    """The permutes to specs in which axes of `anywhere` have changed places."""
    names = tuple(dict.fromkeys(itertools.chain(*anywhere)))
    for order in itertools.permutations(names):
        new = dict(zip(names, order, strict=True))
        dims = tuple(tuple(new.get(axis, axis) for axis in axes) for axes in here.dims)
        yield from _permutation(here, dims, tuple((new.get(axis, axis), op) for axis, op in here.partial))


def _permutation(here: DTensorSpec, dims: Dims, partial: Reductions) -> Iterator[Step]:
    """The permute to other axes, if both split the tensor into the same chunks, all equal, of as many parts."""
    mesh = here.mesh
    if (dims, partial) == (here.dims, here.partial):
        return
    if not {axis for axis, _ in partial}.isdisjoint(itertools.chain(*dims)):
        return
    after = attrs.evolve(here, dims=dims, partial=partial)
    for size, *changed in zip(here.meta.shape, here.dims, dims, strict=True):
        counts = {mesh.axis_size(axes) for axes in changed if changed[0] != changed[1]}
        if len(counts) > 1 or any(size % count for count in counts):
            return
    changes = permuted_axes(here, after)
    moved = {axis for before_after in changes for axes in before_after for axis in axes}
    if moved and mesh.axis_size(changes[-1][0]) == mesh.axis_size(changes[-1][1]):
        axes = tuple(axis for axis in mesh.names if axis in moved)
        yield Step(PERMUTE, axes, here, after)


def _gathers(here: DTensorSpec) -> Iterator[Step]:
    for dim, held in enumerate(here.dims):
        for start in range(len(held)):
            yield Step(ALL_GATHER, held[start:], here, _with_dims(here, (dim, held[:start])), (dim,))


def _partials(here: DTensorSpec, goal: DTensorSpec) -> Iterator[Step]:
    axes = tuple(axis for axis, _ in goal.partial if axis not in _used(here))
    if axes and set(here.partial) <= set(goal.partial):
        op = goal.partial[0][1]
        result = attrs.evolve(here, partial=(*here.partial, *((axis, op) for axis in axes)))
        yield Step(TO_PARTIAL, axes, here, result, (), op)


def _runs(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The contiguous, non-empty parts of a tuple, longest first."""
    for length in range(len(axes), 0, -1):
        for start in range(len(axes) - length + 1):
            yield axes[start : start + length]


@lru_cache
def _orders(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Some or all of the axes in every order, longest first."""
    return tuple(itertools.chain(*(itertools.permutations(axes, count) for count in range(len(axes), 0, -1))))


def _subsets(items: Sequence[_T]) -> Iterator[tuple[_T, ...]]:
    for length in range(len(items), 0, -1):
        yield from itertools.combinations(items, length)


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
