"""`ragged_all_to_all` on torch.distributed: an exchange whose sizes are read on the host when it starts."""

from __future__ import annotations

import math
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from spmd.collectives.transport.exchange import c10d, wait
from spmd.collectives.transport.process_groups import Member
from spmd.collectives.transport.routes import Routes, exchange_rows
from spmd.collectives.transport.transport_dtypes import TransportDtype, moved
from spmd.core.spec import TensorMeta
from spmd.job import device_watch
from spmd.job.collective_scope import CollectiveScope

Pending: TypeAlias = tuple[Tensor, Routes]
"""The rows that a rank receives, not yet waited for, and where they go."""


@attrs.frozen(eq=False)
class RaggedExchange:
    """One rank's part of a `ragged_all_to_all`: its rows are packed by receiver and received by sender.

    Args:
        member: this rank's place in the group.
        row: the shape of one row.
        wire: how rows are sent.
        size: the number of rows of the result.
        transposed: as in `Routes.read`.
        scope: the ranks that take part; makes the error if the collective fails.
    """

    member: Member
    row: tuple[int, ...]
    wire: TransportDtype
    size: int
    transposed: bool
    scope: CollectiveScope = attrs.field(default=CollectiveScope("a collective", ()), kw_only=True)

    @classmethod
    def of(cls, member: Member, operand: TensorMeta, size: int, transposed: bool) -> RaggedExchange:
        """The exchange of rows of an operand with this shape and dtype."""
        return cls(member, operand.shape[1:], moved(operand.dtype), size, transposed)

    def start(self, x: Tensor, table: Tensor) -> Pending:
        """Read the table, which waits for the device, and start to send rows of this rank's operand.

        Raises:
            SpmdError: on all ranks alike, if the table is wrong.
        """
        group, me = self.member.group, self.member.index
        routes = Routes.read(table, self.transposed, self.member.processes)
        sent, received = ([0] * group.size for _ in range(2))
        pieces = [x.new_empty(0, *self.row)] * group.size
        numel = math.prod(self.row) * self.wire.factor
        for index, place in enumerate(self.member.places):
            sent[place], received[place] = routes.counts[me][index] * numel, routes.counts[index][me] * numel
            pieces[place] = routes.taken(x, me, index)
        packed = torch.cat(pieces).resolve_conj().resolve_neg().view(-1)
        with self.scope:
            return c10d.all_to_all_single.default(self.wire.encode(packed), received, sent, self.member.name), routes

    def finish(self, pending: Pending) -> Tensor:
        """Wait for the rows, and return them in their places, and zeros elsewhere."""
        buffer, routes = pending
        with self.scope:
            buffer = wait(buffer)
        if buffer.is_cuda:
            device_watch.note(self.scope)
        counts, me = [0] * self.member.group.size, self.member.index
        for index, place in enumerate(self.member.places):
            counts[place] = routes.counts[index][me]
        rows = self.wire.decode(buffer).view(sum(counts), *self.row)
        by_place = rows.split(counts)
        result = rows.new_zeros((self.size, *self.row))
        for index, place in enumerate(self.member.places):
            if counts[place]:
                routes.place(result, by_place[place], index, me)
        return result

    def __str__(self) -> str:
        return self.scope.what

    def __call__(self, x: Tensor, table: Tensor) -> Tensor:
        """Start the exchange and wait for its result."""
        return self.finish(self.start(x, table))


def stay(member: Member, size: int, transposed: bool, x: Tensor, table: Tensor) -> Tensor:
    """`ragged_all_to_all` in a group of one rank, which does not communicate."""
    return exchange_rows(Routes.read(table, transposed, member.processes), [x], [size])[0]
