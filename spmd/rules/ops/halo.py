"""Halo exchange: what a kernel that slides along a sharded dim needs of neighbours, and gives back to them.

A rank's program knows its shapes but not its place, which is a number that primitives give when it runs. What to
exchange is decided from the places of all ranks, so that all decide alike.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from spmd.collectives import all_gather, ppermute, psum_scatter, shard_offset
from spmd.collectives.environment import resolve_axes
from spmd.core.spec import chunk_bounds
from spmd.rules.rule import Axes

aten = torch.ops.aten

Span: TypeAlias = tuple[int, int]
"""The first row and the one after the last."""


@attrs.frozen
class Halo:
    """A small and a large side, sharded over the same axes: small row `i` meets `reach + 1` large rows.

    The *window* of a shard of the small side is the large rows that it meets: the first is `i * stride - padding` for
    its first row `i`. Rows of a window before the start of the large side or past its end are zeros.

    Args:
        dim: the dim that is sharded.
        axes: the mesh axes that it is sharded over.
        small: the length of the small side.
        large: the length of the large side.
        stride: the distance of the large rows that neighbouring small rows meet.
        padding: how far the first window lies before the start.
        reach: the distance of the first and the last large row that a small row meets.
    """

    dim: int
    axes: Axes
    small: int
    large: int
    stride: int
    padding: int
    reach: int

    def gather(self, x: Tensor, rows: int) -> Tensor:
        """The window of `rows` small rows, at least one, from a shard `x` of the large side.

        Neighbours send their borders to each other; where a window reaches past them, the dim is gathered.
        """
        length = (rows - 1) * self.stride + self.reach + 1
        if not self._near:
            x = all_gather(x, self.axes, axis=self.dim, tiled=True, size=self.large)
        else:
            held, (before, after) = x.shape[self.dim], self._borders
            pieces = [x]
            if before:
                pieces.insert(0, self._send(self._place(x, before - held, before), 1))
            if after:
                pieces.append(self._send(self._place(x, 0, after), -1))
            x = torch.cat(pieces, self.dim) if len(pieces) > 1 else x
        offsets, offset = self._offsets()
        if len(offsets) == 1:
            return self._place(x, -offsets.pop(), length)
        index = torch.arange(length, device=x.device) + (offset + 1)
        padded = self._place(x, 1, x.shape[self.dim] + 2)
        return padded.index_select(self.dim, index.clamp(0, x.shape[self.dim] + 1))

    def scatter(self, window: Tensor, held: int) -> Tensor:
        """This rank's shard, of `held` rows, of the sum of all ranks' windows: the transpose of `gather`."""
        before, after = self._borders
        length = before + held + after if self._near else self.large
        offsets, offset = self._offsets()
        if len(offsets) == 1:
            sums = self._place(window, offsets.pop(), length)
        else:
            index = torch.arange(window.shape[self.dim], device=window.device) + (offset + 1)
            shape = [length + 2 if dim == self.dim else size for dim, size in enumerate(window.shape)]
            sums = window.new_zeros(shape).index_add(self.dim, index.clamp(0, length + 1), window)
            sums = sums.narrow(self.dim, 1, length)
        if not self._near:
            return psum_scatter(sums, self.axes, scatter_dimension=self.dim, tiled=True, size=held)
        own = sums.narrow(self.dim, before, held)
        if before:
            own = own + self._place(self._send(sums.narrow(self.dim, 0, before), -1), held - before, held)
        if after:
            own = own + self._place(self._send(sums.narrow(self.dim, before + held, after), 1), 0, held)
        return own

    @property
    def _shards(self) -> list[Span]:
        """The large rows of every rank, in rank order."""
        return self._chunks(self.large)

    def _chunks(self, size: int) -> list[Span]:
        counts = resolve_axes(self.axes)[1]
        return [chunk_bounds(size, counts, index) for index in itertools.product(*map(range, counts))]

    @property
    def _needs(self) -> list[tuple[int, int, int]]:
        """For every rank whose window has rows inside, the rank, the first of those and the one after the last."""
        spans = [
            (rank, max(lo * self.stride - self.padding, 0), (hi - 1) * self.stride - self.padding + self.reach + 1)
            for rank, (lo, hi) in enumerate(self._chunks(self.small))
            if lo < hi
        ]
        return [(rank, start, min(stop, self.large)) for rank, start, stop in spans if start < min(stop, self.large)]

    @property
    def _near(self) -> bool:
        """Whether no window reaches past its rank's neighbours."""
        shards = self._shards
        lows, highs = [shards[0], *shards], [*shards[1:], shards[-1]]
        return all(lows[rank][0] <= start and stop <= highs[rank][1] for rank, start, stop in self._needs)

    @property
    def _borders(self) -> Span:
        """How many rows some rank needs of the one below, and of the one above."""
        shards, needs = self._shards, self._needs
        before = max((shards[rank][0] - start for rank, start, _ in needs), default=0)
        return max(before, 0), max([0, *(stop - shards[rank][1] for rank, _, stop in needs)])

    def _offsets(self) -> tuple[set[int], Any]:
        """Where windows start in what ranks have of the large side, on all that have small rows, and on this one."""
        before = self._borders[0]
        pairs = zip(self._chunks(self.small), self._shards, strict=True)
        starts = {
            small * self.stride - self.padding - (large - before if self._near else 0)
            for (small, end), (large, _) in pairs
            if small < end
        }
        if len(starts) == 1:
            return starts, None
        start = shard_offset(self.small, self.axes) * self.stride - self.padding
        return starts, start - shard_offset(self.large, self.axes) + before if self._near else start

    def _send(self, border: Tensor, step: int) -> Tensor:
        ranks = range(len(self._shards))
        pairs = [(rank, rank + step) for rank in ranks if rank + step in ranks]
        return ppermute(border.contiguous(), self.axes, pairs)

    def _place(self, x: Tensor, start: int, length: int) -> Tensor:
        """`length` rows that are zero but for those of `x` at `start`, which may be negative."""
        held = x.shape[self.dim]
        added = (max(start, 0), max(length - start - held, 0))
        if any(added):
            x = aten.constant_pad_nd.default(x, [*(0,) * (2 * (x.ndim - 1 - self.dim)), *added])
        first = max(-start, 0)
        return x if x.shape[self.dim] == length else x.narrow(self.dim, first, length)
