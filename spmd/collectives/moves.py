"""The moves between specs that are one primitive each, and the search for the cheapest sequence of them.

Chunks are nested, so only the innermost axes of a dim can change directly. An outer axis changes after the axes inside
it are gathered or moved away, or by a permute if the chunks are equal. A move puts an axis only where the goal has it,
which keeps the search small for any number of dims.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import attrs

from spmd.collectives.traffic import StepKind, ring_bytes
from spmd.core.mesh import Mesh
from spmd.core.placement import Reduction
from spmd.core.spec import Dims, TensorMeta
from spmd.errors import ShardingError


@attrs.frozen(cache_hash=True)
class Sharding:
    """A spec without its mesh and meta; as in a spec, all partial axes have the same reduction.

    Args:
        dims: for each tensor dim, the mesh axes that shard it, major first.
        partial: the axes over which the value is partial, each with its reduction; sorted by axis name.
    """

    dims: Dims
    partial: tuple[tuple[str, Reduction], ...] = ()

    def replace_dims(self, *changes: tuple[int, tuple[str, ...]]) -> Sharding:
        """This sharding with other axes on some dims; `changes` are pairs of dim and axes."""
        axes = dict(changes)
        return attrs.evolve(self, dims=tuple(axes.get(dim, old) for dim, old in enumerate(self.dims)))

    def without_partial(self, axes: Sequence[str]) -> Sharding:
        """This sharding after a reduction over `axes`."""
        return attrs.evolve(self, partial=tuple(item for item in self.partial if item[0] not in axes))

    def with_partial(self, axes: Sequence[str], op: Reduction) -> Sharding:
        """This sharding, partial by `op` over `axes` too."""
        return attrs.evolve(self, partial=tuple(sorted((*self.partial, *((axis, op) for axis in axes)))))

    @property
    def used(self) -> frozenset[str]:
        """The axes over which the value is not replicated."""
        return frozenset(itertools.chain(*self.dims, (axis for axis, _ in self.partial)))


@attrs.frozen
class Move:
    """One primitive of a redistribution.

    Args:
        kind: the primitive.
        axes: the mesh axes that it works along, major first.
        result: the layout after it.
        dims: the tensor dims that it changes: `(dim,)`, or `(split_dim, concat_dim)` of an all_to_all; else empty.
        op: the reduction of an all_reduce, reduce_scatter or to_partial.
    """

    kind: StepKind
    axes: tuple[str, ...]
    result: Sharding
    dims: tuple[int, ...] = ()
    op: Reduction | None = None


def cheapest_moves(mesh: Mesh, meta: TensorMeta, source: Sharding, goal: Sharding) -> tuple[Move, ...]:
    """The moves from source to goal that send the fewest bytes; among those, the fewest collectives, then moves.

    Dijkstra's algorithm over layouts; ties are broken by the order in which `_moves` lists moves.

    Args:
        mesh: the mesh.
        meta: global shape and dtype of the tensor.
        source, goal: layouts without axes of size 1.
    """
    counter = itertools.count()
    queue: list[tuple[tuple[float, int, int], int, Sharding, tuple[Move, ...]]] = [((0.0, 0, 0), 0, source, ())]
    done: set[Sharding] = set()
    while queue:
        (sent, collectives, steps), _, here, path = heapq.heappop(queue)
        if here == goal:
            return path
        if here in done:
            continue
        done.add(here)
        for move in _moves(mesh, meta, here, goal):
            if move.result not in done:
                total = round(sent + _move_bytes(mesh, meta, here, move), 3)
                cost = (total, collectives + move.kind.is_collective, steps + 1)
                heapq.heappush(queue, (cost, next(counter), move.result, (*path, move)))
    raise ShardingError(f"No sequence of collectives leads from {source} to {goal} on {mesh}. Please report this.")


def _move_bytes(mesh: Mesh, meta: TensorMeta, here: Sharding, move: Move) -> float:
    whole = move.result if move.kind is StepKind.ALL_GATHER else here
    return ring_bytes(move.kind, mesh.axis_size(move.axes), _local_bytes(mesh, meta, whole.dims))


def _local_bytes(mesh: Mesh, meta: TensorMeta, dims: Dims) -> int:
    nbytes = meta.dtype.itemsize
    for size, axes in zip(meta.shape, dims, strict=True):
        for axis in axes:
            size = -(-size // mesh.axis_size(axis))
        nbytes *= size
    return nbytes


def _moves(mesh: Mesh, meta: TensorMeta, here: Sharding, goal: Sharding) -> Iterator[Move]:
    yield from _slices(here, goal)
    yield from _reductions(here, goal)
    yield from _exchanges(here, goal)
    yield from _permutations(mesh, meta, here, goal)
    yield from _gathers(here)
    yield from _partials(here, goal)


def _slices(here: Sharding, goal: Sharding) -> Iterator[Move]:
    used = here.used
    for dim, wanted in enumerate(goal.dims):
        for run in _runs(wanted):
            if used.isdisjoint(run):
                yield Move(StepKind.SHARD, run, here.replace_dims((dim, here.dims[dim] + run)), (dim,))


def _reductions(here: Sharding, goal: Sharding) -> Iterator[Move]:
    if not here.partial:
        return
    op = here.partial[0][1]
    axes = tuple(axis for axis, _ in here.partial)
    for dim, wanted in enumerate(goal.dims):
        for run in _runs(wanted):
            if set(run) <= set(axes):
                result = here.without_partial(run).replace_dims((dim, here.dims[dim] + run))
                yield Move(StepKind.REDUCE_SCATTER, run, result, (dim,), op)
    for chosen in _subsets(axes):
        yield Move(StepKind.ALL_REDUCE, chosen, here.without_partial(chosen), (), op)


def _exchanges(here: Sharding, goal: Sharding) -> Iterator[Move]:
    for concat, held in enumerate(here.dims):
        for split, wanted in enumerate(goal.dims):
            if split == concat:
                continue
            for run in _runs(wanted):
                if held[-len(run) :] == run:
                    changes = (concat, held[: -len(run)]), (split, here.dims[split] + run)
                    yield Move(StepKind.ALL_TO_ALL, run, here.replace_dims(*changes), (split, concat))


def _permutations(mesh: Mesh, meta: TensorMeta, here: Sharding, goal: Sharding) -> Iterator[Move]:
    for dim, (held, wanted) in enumerate(zip(here.dims, goal.dims, strict=True)):
        order = {axis: position for position, axis in enumerate(wanted)}
        inner = tuple(axis for axis in held if axis not in order)
        reordered = tuple(sorted((axis for axis in held if axis in order), key=order.__getitem__)) + inner
        yield from _permutation(mesh, meta, here, here.replace_dims((dim, reordered)))
    yield from _permutation(mesh, meta, here, attrs.evolve(here, dims=goal.dims))


def _permutation(mesh: Mesh, meta: TensorMeta, here: Sharding, result: Sharding) -> Iterator[Move]:
    """The permute between two layouts, if both split the tensor into the same chunks, all equal."""
    changed = tuple(zip(here.dims, result.dims, strict=True))
    for size, (before, after) in zip(meta.shape, changed, strict=True):
        if before != after and (mesh.axis_size(before) != mesh.axis_size(after) or size % mesh.axis_size(before)):
            return
    middles = [_strip_common(before, after) for before, after in changed]
    moved = {axis for before, after in middles for axis in before + after}
    if moved and moved.isdisjoint(axis for axis, _ in here.partial):
        yield Move(StepKind.PERMUTE, tuple(axis for axis in mesh.names if axis in moved), result)


def _gathers(here: Sharding) -> Iterator[Move]:
    for dim, held in enumerate(here.dims):
        for start in range(len(held)):
            yield Move(StepKind.ALL_GATHER, held[start:], here.replace_dims((dim, held[:start])), (dim,))


def _partials(here: Sharding, goal: Sharding) -> Iterator[Move]:
    axes = tuple(axis for axis, _ in goal.partial if axis not in here.used)
    if axes and set(here.partial) <= set(goal.partial):
        op = goal.partial[0][1]
        yield Move(StepKind.TO_PARTIAL, axes, here.with_partial(axes, op), (), op)


def _runs(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The contiguous, non-empty parts of a tuple, longest first."""
    for length in range(len(axes), 0, -1):
        for start in range(len(axes) - length + 1):
            yield axes[start : start + length]


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for length in range(len(axes), 0, -1):
        yield from itertools.combinations(axes, length)


def _strip_common(before: tuple[str, ...], after: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Both tuples without their common prefix and suffix."""
    while before and after and before[0] == after[0]:
        before, after = before[1:], after[1:]
    while before and after and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    return before, after


@lru_cache(maxsize=4096)
def permutation_sources(mesh: Mesh, axes: tuple[str, ...], before: Dims, after: Dims) -> tuple[int, ...]:
    """The `sources` of a permute: for each index along `axes`, the index of a rank that holds the chunk it needs.

    No rank sends to two others, and one that already holds its chunk keeps it. The layouts `before` and `after` must
    split the tensor into the same chunks.
    """
    cuts = (strip_trivial(mesh, Sharding(dims)).dims for dims in (before, after))
    middles = [_strip_common(*pair) for pair in zip(*cuts, strict=True)]
    indices = list(itertools.product(*(range(mesh.axis_size(axis)) for axis in axes)))

    def piece(index: tuple[int, ...], side: int) -> tuple[int, ...]:
        coordinate = dict(zip(axes, index, strict=True))
        return tuple(_flat_index(mesh, coordinate, middle[side]) for middle in middles)

    held = [piece(index, 0) for index in indices]
    wanted = [piece(index, 1) for index in indices]
    senders: dict[tuple[int, ...], list[int]] = {}
    for rank, have in enumerate(held):
        if have != wanted[rank]:
            senders.setdefault(have, []).append(rank)
    return tuple(rank if held[rank] == want else senders[want].pop(0) for rank, want in enumerate(wanted))


def _flat_index(mesh: Mesh, coordinate: dict[str, int], axes: tuple[str, ...]) -> int:
    index = 0
    for axis in axes:
        index = index * mesh.axis_size(axis) + coordinate[axis]
    return index


def strip_trivial(mesh: Mesh, sharding: Sharding) -> Sharding:
    """The layout without axes of size 1, along which nothing is split or reduced."""
    dims = tuple(tuple(axis for axis in axes if mesh.axis_size(axis) > 1) for axes in sharding.dims)
    return Sharding(dims, tuple((axis, op) for axis, op in sharding.partial if mesh.axis_size(axis) > 1))
