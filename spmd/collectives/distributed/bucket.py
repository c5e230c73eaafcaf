"""Collectives of one kind that are sent as one: their flat buffers side by side in a larger one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from spmd.collectives.distributed.exchange import Exchange, wait
from spmd.job import device_watch
from spmd.job.collective_scope import CollectiveScope


@attrs.frozen(eq=False)
class Bucket:
    """One rank's part of several collectives that are launched as one.

    The buffer that is sent has, for each rank that receives a part of its own, the parts of all collectives one after
    the other; so has the buffer that is received, for each rank that sends one.

    Args:
        parts: the collectives; of one operator with equal arguments, in one dtype.
        scope: the ranks that take part; makes the error if the collective fails.
    """

    parts: tuple[Exchange, ...]
    scope: CollectiveScope

    @classmethod
    def of(cls, parts: Sequence[Exchange]) -> Bucket:
        """The bucket of collectives."""
        first = parts[0].scope
        others = "another" if len(parts) == 2 else f"{len(parts) - 1} others"
        return cls(tuple(parts), attrs.evolve(first, what=f"{first.what} and {others}, sent as one"))

    @property
    def in_place(self) -> Callable[..., Tensor] | None:
        """As in `Exchange`."""
        return self.parts[0].in_place

    @property
    def is_shared(self) -> bool:
        """Whether results are views of the buffer that is received."""
        return self.parts[0].receives == 1

    def pack(self, *operands: Tensor) -> Tensor:
        """The buffer that is sent."""
        sends = self.parts[0].sends
        flat = [part.pack(x) for part, x in zip(self.parts, operands, strict=True)]
        return torch.cat([x.view(sends, x.numel() // sends) for x in flat], 1).view(-1)

    def received(self, packed: Tensor) -> Tensor:
        """The buffer that is received for `packed`, which may be the same; another one has no values."""
        return packed if self.in_place else packed.new_empty(sum(part.receives * part.width for part in self.parts))

    def unpack(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """The results from the buffer that was received."""
        widths = [part.width for part in self.parts]
        rows = buffer.view(self.parts[0].receives, sum(widths)).split(widths, 1)
        return tuple(part.unpack(row) for part, row in zip(self.parts, rows, strict=True))

    def start(self, *operands: Tensor) -> Tensor:
        """Start the collective on this rank's operands; the result is pending, and only `finish` may use it."""
        first = self.parts[0]
        packed = self.pack(*operands)
        with self.scope:
            return (first.in_place or first.op)(packed, *first.arguments)

    def finish(self, pending: Tensor) -> tuple[Tensor, ...]:
        """Wait for the collective that `start` has started, and return all results."""
        with self.scope:
            buffer = wait(pending)
        if buffer.is_cuda:
            device_watch.note(self.scope)
        return self.unpack(buffer)

    def __str__(self) -> str:
        return self.scope.what
