"""The cheapest sequences of steps between all specs of a mesh, found by exhaustion.

Independent of `spmd.collectives.moves`: every ordered pair of specs is asked whether one primitive leads from one to
the other, by what the ranks hold before and after, and Floyd and Warshall's algorithm joins the answers.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs
import torch

from spmd.collectives.block_exchange import BlockExchange
from spmd.collectives.cheapest import LAUNCH_BYTES, eager_cost
from spmd.collectives.step import Step
from spmd.core.spec import DTensorSpec


@attrs.frozen(order=True)
class Cost:
    """What a sequence of steps costs.

    Args:
        price: by the cost model: the bytes in a program; outside of one `eager_cost`.
        count: the number of collectives.
        bytes: the bytes that a rank sends, by the ring model.
    """

    price: float
    count: int
    bytes: float


def cost_of(steps: Sequence[Step | BlockExchange], *, eager: bool) -> Cost:
    """The cost of the steps that the library has found."""
    sent = math.fsum(step.bytes for step in steps)
    price = math.fsum(map(eager_cost, steps)) if eager else sent
    return Cost(price, sum(step.is_collective for step in steps), sent)


MOST = 6
"""The collectives that `optima` counts; no sequence that the library finds has more."""


def optima(specs: Sequence[DTensorSpec], *, eager: bool) -> torch.Tensor:
    """The least prices of sequences of steps from each spec to each other, through any specs of no larger shards.

    Args:
        specs: all specs of a mesh, with even shards.
        eager: whether an exchange of blocks is a step, and launches take time.

    Returns:
        A tensor [source, target, n] of the least prices with at most n collectives, for n below `MOST`; with n =
        `MOST`, with any number.
    """
    least = torch.full((len(specs), len(specs), MOST + 1), math.inf, dtype=torch.float64)
    for (row, source), (column, target) in itertools.product(enumerate(specs), repeat=2):
        for price, count in _edges(source, target, eager):
            least[row, column, count:] = least[row, column, count:].clamp(max=price)
    sizes = torch.tensor([spec.local_bytes() for spec in specs])
    ends = torch.maximum(sizes[:, None], sizes)
    found = least.clone()
    # Floyd and Warshall's algorithm over ever larger shards: what it has after some size has passed through no larger.
    for size in sizes.unique():
        for middle in torch.nonzero(sizes == size).flatten().tolist():
            _join(least, middle)
        found[ends == size] = least[ends == size]
    return found


def _join(least: torch.Tensor, middle: int) -> None:
    """Let sequences pass through one more spec."""
    before, after = least[:, middle].clone(), least[middle].clone()
    for first, second in itertools.product(range(MOST + 1), repeat=2):
        through = before[:, None, first] + after[None, :, second]
        least[..., min(first + second, MOST) :].clamp_(max=through[..., None])


def _edges(before: DTensorSpec, after: DTensorSpec, eager: bool) -> Iterator[tuple[float, int]]:
    """The price and the number of collectives of each single step from one spec to another, or of none."""
    if before == after:
        yield 0.0, 0
        return
    for sent, count in _steps(before, after):
        yield sent + LAUNCH_BYTES * count * eager, count
    if eager:
        cost = cost_of([BlockExchange(before, after)], eager=True)
        yield cost.price, cost.count


def _steps(before: DTensorSpec, after: DTensorSpec) -> Iterator[tuple[float, int]]:
    """The bytes and the collectives of the primitives that lead from one spec to another; shards must be even."""
    held, wanted = before.local_bytes(), after.local_bytes()
    pending, left = dict(before.partial), dict(after.partial)
    changed = [dim for dim, pair in enumerate(zip(before.dims, after.dims, strict=True)) if pair[0] != pair[1]]
    if not changed and left.items() < pending.items():
        ranks = before.mesh.axis_size([axis for axis in pending if axis not in left])
        yield 2 * held * (ranks - 1) / ranks, 1
    if not changed and pending.items() < left.items() and not _axes(before) & (left.keys() - pending.keys()):
        yield 0.0, 0
    if len(changed) == 1:
        yield from _on_one_dim(before, after, changed[0])
    if len(changed) == 2 and pending == left:
        for grown, shrunk in (changed, reversed(changed)):
            run = _rest(before.dims[grown], after.dims[grown])
            if run and run == _rest(after.dims[shrunk], before.dims[shrunk]):
                ranks = before.mesh.axis_size(run)
                yield held * (ranks - 1) / ranks, 1
    if held == wanted and set(pending.values()) == set(left.values()) and _holdings(before) == _holdings(after):
        yield float(held), 1


def _on_one_dim(before: DTensorSpec, after: DTensorSpec, dim: int) -> Iterator[tuple[float, int]]:
    """The steps that change one dim only: shard, reduce_scatter and all_gather."""
    pending, left = dict(before.partial), dict(after.partial)
    if run := _rest(before.dims[dim], after.dims[dim]):
        if pending == left and not _axes(before) & set(run):
            yield 0.0, 0
        if (
            pending.items() - left.items() == {(axis, pending.get(axis)) for axis in run}
            and left.items() < pending.items()
        ):
            ranks = before.mesh.axis_size(run)
            yield before.local_bytes() * (ranks - 1) / ranks, 1
    if (run := _rest(after.dims[dim], before.dims[dim])) and pending == left:
        ranks = before.mesh.axis_size(run)
        yield after.local_bytes() * (ranks - 1) / ranks, 1


def _rest(start: tuple[str, ...], axes: tuple[str, ...]) -> tuple[str, ...]:
    """What follows in `axes` after `start`; empty if they do not begin so."""
    return axes[len(start) :] if axes[: len(start)] == start else ()


def _axes(spec: DTensorSpec) -> set[str]:
    """The axes along which ranks hold different things."""
    return {*itertools.chain(*spec.dims), *(axis for axis, _ in spec.partial)}


def _holdings(spec: DTensorSpec) -> Counter[object]:
    """How many ranks hold each block of each part of a value: equal before and after a permute."""
    parts = [axis for axis, _ in spec.partial]
    return Counter(
        (spec.mesh.axis_index(where, parts), *((part.start, part.stop) for part in spec.local_slices(where)))
        for where in spec.mesh.coordinates()
    )
