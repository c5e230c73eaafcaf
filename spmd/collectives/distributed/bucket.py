"""Collectives of one kind that are sent as one: their flat buffers side by side in a larger one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property

import attrs
import torch
from torch import Tensor

from spmd.collectives.transport.exchange import Exchange, wait
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
        return len(self.parts[0].receives) == 1

    @cached_property
    def sends(self) -> tuple[int, ...]:
        """As in `Exchange`."""
        return _sums([part.sends for part in self.parts])

    @cached_property
    def receives(self) -> tuple[int, ...]:
        """As in `Exchange`."""
        return _sums([part.receives for part in self.parts])

    def pack(self, *operands: Tensor) -> Tensor:
        """The buffer that is sent."""
        sizes = [part.sends for part in self.parts]
        if not _are_equal(sizes):
            pairs = zip(self.parts, operands, sizes, strict=True)
            pieces = [part.pack(x).split(size) for part, x, size in pairs]
            return torch.cat(list(itertools.chain(*zip(*pieces, strict=True))))
        arranged = [part.arrange(x) for part, x in zip(self.parts, operands, strict=True)]
        buffer = arranged[0].new_empty(len(self.sends), self.sends[0])
        places = buffer.split([size[0] for size in sizes], 1)
        alike = [_alike(place, x) for place, x in zip(places, arranged, strict=True)]
        torch._foreach_copy_([place for place, _ in alike], [x for _, x in alike])
        return buffer.view(-1)

    def received(self, packed: Tensor) -> Tensor:
        """The buffer that is received for `packed`, which may be the same; another one has no values."""
        return packed if self.in_place else packed.new_empty(sum(self.receives))

    def unpack(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """The results from the buffer that was received."""
        return tuple(part.unpack(row) for part, row in zip(self.parts, self.rows(buffer), strict=True))

    def rows(self, buffer: Tensor) -> Sequence[Tensor]:
        """What each collective received."""
        sizes = [part.receives for part in self.parts]
        if _are_equal(sizes):
            return buffer.view(len(self.receives), -1).split([size[0] for size in sizes], 1)
        pieces = buffer.split(list(itertools.chain(*zip(*sizes, strict=True))))
        return tuple(torch.cat(pieces[number :: len(sizes)]) for number in range(len(sizes)))

    def start(self, *operands: Tensor) -> Tensor:
        """Start the collective on this rank's operands; the result is pending, and only `finish` may use it."""
        first = self.parts[0]
        packed = self.pack(*operands)
        with self.scope:
            return (first.in_place or first.op)(packed, *first.sized_arguments(self.receives, self.sends))

    def finish(self, pending: Tensor) -> tuple[Tensor, ...]:
        """Wait for the collective that `start` has started, and return all results."""
        with self.scope:
            buffer = wait(pending)
        if buffer.is_cuda:
            device_watch.note(self.scope)
        return self.unpack(buffer)

    def __str__(self) -> str:
        return self.scope.what


def _alike(place: Tensor, arranged: Tensor) -> tuple[Tensor, Tensor]:
    """A place in the buffer, with a row for each part, and what is copied there, as views of one shape."""
    return (place, arranged.view(place.shape)) if arranged.ndim == 1 else (place.view(arranged.shape), arranged)


def _sums(sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The sizes of the parts of all collectives for each rank."""
    return tuple(map(sum, zip(*sizes, strict=True)))


def _are_equal(sizes: Sequence[tuple[int, ...]]) -> bool:
    """Whether each collective's parts are equal."""
    return all(len(set(size)) == 1 for size in sizes)
