"""Halo exchange: the rows of a sharded dim that a sliding kernel needs from other ranks, and its transpose.

A rank's program is traced without knowing the rank's index, which is a tensor at run time. Which rows to exchange is
decided from the shards of all ranks, so that all ranks decide the same.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from spmd.collectives import all_gather, axis_index, ppermute, psum_scatter, shard_offset
from spmd.rules.ops.by_rank import chunks
from spmd.rules.ops.one_dim import padded, resized
from spmd.rules.rule import Axes

aten = torch.ops.aten

Span: TypeAlias = tuple[int, int]
"""The first row, and the row after the last; or, of borders, the number of rows before and after a shard."""


@attrs.frozen
class Halo:
    """The halo exchange of a sliding kernel between two tensors, whose dim `dim` is sharded over the same mesh axes.

    The *large side* is the input of a convolution, the *small side* its output; a transposed convolution has them the
    other way. *Rows* are indices along `dim`. Small row `i` depends on the large rows from `i * stride - padding`
    through `i * stride - padding + reach`. The *window* of a shard of the small side is all large rows that the shard
    depends on. Rows of a window outside of the large side have a fill value.

    Args:
        dim: the dim that is sharded.
        axes: the mesh axes that it is sharded over.
        small: the global length of the small side.
        large: the global length of the large side.
        stride: the kernel's stride.
        padding: the kernel's padding before the first large row.
        reach: the dilated kernel size minus 1.
    """

    dim: int
    axes: Axes
    small: int
    large: int
    stride: int
    padding: int
    reach: int

    def gather(self, x: Tensor, rows: int, fill: Any = 0) -> Tensor:
        """The window of this rank's shard of the small side, from its shard `x` of the large side.

        Neighbours send each other the rows at their borders. If a window reaches beyond the neighbours, the dim is
        all-gathered instead.

        Args:
            x: this rank's shard of the large side.
            rows: the number of small rows, at least 1.
            fill: the value of rows outside of the large side.
        """
        length = self.length(rows)
        if not self._near:
            x = all_gather(x, self.axes, axis=self.dim, tiled=True, size=self.large)
        else:
            held, (before, after) = x.shape[self.dim], self._borders
            pieces = [x]
            if before:
                pieces.insert(0, self._send(self._place(x, before - held, before, fill), 1, fill))
            if after:
                pieces.append(self._send(self._place(x, 0, after, fill), -1, fill))
            x = torch.cat(pieces, self.dim) if len(pieces) > 1 else x
        offsets, offset = self._offsets()
        if len(offsets) == 1:
            return self._place(x, -offsets.pop(), length, fill)
        index = torch.arange(length, device=x.device) + (offset + 1)
        padded = self._place(x, 1, x.shape[self.dim] + 2, fill)
        return padded.index_select(self.dim, index.clamp(0, x.shape[self.dim] + 1))

    def length(self, rows: int) -> int:
        """The length of the window of `rows` small rows, at least 1."""
        return (rows - 1) * self.stride + self.reach + 1

    def scatter(self, window: Tensor, held: int) -> Tensor:
        """The transpose of `gather`: this rank's shard of the sum of all ranks' windows.

        Args:
            window: the window of this rank's shard of the small side.
            held: the number of rows of this rank's shard of the large side.
        """
        before, after = self._borders
        length = before + held + after if self._near else self.large
        offsets, offset = self._offsets()
        if len(offsets) == 1:
            sums = self._place(window, offsets.pop(), length)
        else:
            index = torch.arange(window.shape[self.dim], device=window.device) + (offset + 1)
            sums = window.new_zeros(resized(window.shape, self.dim, length + 2))
            sums = sums.index_add(self.dim, index.clamp(0, length + 1), window)
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
        """Every rank's shard of the large side, in rank order."""
        return chunks(self.large, self.axes)

    @property
    def _needs(self) -> list[tuple[int, int, int]]:
        """The ranks whose windows have rows inside the large side, each with its first such row and the end of them."""
        spans = [
            (rank, max(lo * self.stride - self.padding, 0), (hi - 1) * self.stride - self.padding + self.reach + 1)
            for rank, (lo, hi) in enumerate(chunks(self.small, self.axes))
            if lo < hi
        ]
        return [(rank, start, min(stop, self.large)) for rank, start, stop in spans if start < min(stop, self.large)]

    @property
    def _near(self) -> bool:
        """Whether no window reaches beyond the shards of its rank's neighbours."""
        shards = self._shards
        lows, highs = [shards[0], *shards], [*shards[1:], shards[-1]]
        return all(lows[rank][0] <= start and stop <= highs[rank][1] for rank, start, stop in self._needs)

    @property
    def _borders(self) -> Span:
        """The most rows that any rank needs from the previous rank, and from the next one."""
        shards, needs = self._shards, self._needs
        before = max((shards[rank][0] - start for rank, start, _ in needs), default=0)
        return max(before, 0), max([0, *(stop - shards[rank][1] for rank, _, stop in needs)])

    def _offsets(self) -> tuple[set[int], Any]:
        """Where windows start, counted from the first large row that the rank has after the exchange.

        Returns:
            The set of starts on all ranks with small rows; and this rank's as a 0-d tensor, or None if all are equal.
        """
        before = self._borders[0]
        pairs = zip(chunks(self.small, self.axes), self._shards, strict=True)
        starts = {
            small * self.stride - self.padding - (large - before if self._near else 0)
            for (small, end), (large, _) in pairs
            if small < end
        }
        if len(starts) == 1:
            return starts, None
        start = shard_offset(self.small, self.axes) * self.stride - self.padding
        return starts, start - shard_offset(self.large, self.axes) + before if self._near else start

    def _send(self, border: Tensor, step: int, fill: Any = 0) -> Tensor:
        """The border of the rank `step` before this one; `fill` where there is none."""
        ranks = range(len(self._shards))
        pairs = [(rank, rank + step) for rank in ranks if rank + step in ranks]
        received = ppermute(border.contiguous(), self.axes, pairs)
        if not fill:
            return received
        return received.masked_fill(axis_index(self.axes).to(border.device) == (0 if step > 0 else ranks[-1]), fill)

    def _place(self, x: Tensor, start: int, length: int, fill: Any = 0) -> Tensor:
        """`length` rows with those of `x` from row `start` on, which may be negative, and `fill` elsewhere."""
        held = x.shape[self.dim]
        x = padded(x, self.dim, max(start, 0), max(length - start - held, 0), fill)
        first = max(-start, 0)
        return x if x.shape[self.dim] == length else x.narrow(self.dim, first, length)
