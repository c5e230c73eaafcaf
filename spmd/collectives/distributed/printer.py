"""Printing on a distributed mesh: the texts of all ranks go to the first one, which prints them in rank order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from spmd.collectives.host import print_lines, text_of
from spmd.collectives.transport.process_groups import group_for, in_rank_order
from spmd.core.mesh import Coordinate, Mesh
from spmd.job.collective_scope import CollectiveScope


class Printer:
    """One call of `host_print` on this process's rank; all ranks make it and call it together.

    Args:
        mesh: a distributed mesh.
        coordinate: the coordinate of this process's rank.
        pieces: as in `spmd.collectives.host`.
    """

    __name__ = "host_print"

    def __init__(self, mesh: Mesh, coordinate: Coordinate, pieces: tuple[str, ...]) -> None:
        self._is_first, self._ranks, self._pieces = mesh.rank(coordinate) == 0, mesh.ranks, pieces
        # On the CPU and apart from the program's groups, whose collectives may be in flight.
        self._group = group_for("printing", mesh.ranks) if mesh.size > 1 else None

    def __call__(self, *values: Tensor) -> Tensor:
        """Send this rank's text to the first rank; there, wait for those of all ranks and print them."""
        text = text_of(values, self._pieces)
        texts: list[str] = [text] * len(self._ranks)
        if self._group is not None:
            received = texts if self._is_first else None
            with CollectiveScope(f"spmd.debug.print({''.join(self._pieces[::2])!r:.40})", self._ranks):
                dist.gather_object(text, received, dst=self._ranks[0], group=self._group)
        if self._is_first:
            print_lines(zip(self._ranks, in_rank_order(texts, self._ranks), strict=True))
        return torch.empty(0)
