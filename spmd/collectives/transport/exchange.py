"""One rank's part of a collective, by torch's functional collectives on flat buffers.

A collective is asynchronous: `start` returns at once, and `finish` waits for the result. What depends on the rank (its
chunk, the ranks it sends to) is computed once, when the call is bound, from the shape of the operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.collectives.transport.flat_chunks import FlatChunks
from spmd.collectives.transport.process_groups import Member
from spmd.collectives.transport.transport_dtypes import TransportDtype
from spmd.job import device_watch
from spmd.job.collective_scope import CollectiveScope

c10d = torch.ops._c10d_functional
wait = c10d.wait_tensor.default


@attrs.frozen(eq=False)
class Exchange:
    """One rank's part of a collective: pack the operand, run a functional collective of torch's, unpack the result.

    Args:
        op: the collective on flat tensors, by an operator of `_c10d_functional`.
        arguments: its arguments after the tensor and, of an all_to_all, the sizes of parts.
        arrange: makes what is sent of the operand, its elements in the order of the buffer; a view of the operand if
            nothing else changes.
        unpack: makes the result, which is contiguous, from the buffer that was received: flat, or with a row for each
            of `receives`, if these are equal.
        sends, receives: the number of elements of each part of the two buffers: one for each rank, or one.
        takes_sizes: whether `op` takes `receives` and `sends`.
        in_place: as `op`, but it may write to the buffer that is sent; None if there is no such operator.
        scope: the ranks that take part; makes the error if the collective fails.
    """

    op: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    arrange: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]
    sends: tuple[int, ...] = attrs.field(kw_only=True)
    receives: tuple[int, ...] = attrs.field(kw_only=True)
    takes_sizes: bool = attrs.field(default=False, kw_only=True)
    in_place: Callable[..., Tensor] | None = attrs.field(default=None, kw_only=True)
    scope: CollectiveScope = attrs.field(default=CollectiveScope("a collective", ()), kw_only=True)

    def pack(self, x: Tensor) -> Tensor:
        """The flat buffer that is sent."""
        return flat(self.arrange(x))

    def received(self, packed: Tensor) -> Tensor:
        """A new buffer like the one that is received for `packed`."""
        return packed.new_empty(sum(self.receives))

    def sized_arguments(self, receives: Sequence[int], sends: Sequence[int]) -> tuple[Any, ...]:
        """The arguments after a buffer with parts of these sizes."""
        return (list(receives), list(sends), *self.arguments) if self.takes_sizes else self.arguments

    def start(self, x: Tensor) -> Tensor:
        """Start the collective on this rank's operand; the result is pending, and only `finish` may use it."""
        packed = self.pack(x)
        with self.scope:
            return self.op(packed, *self.sized_arguments(self.receives, self.sends))

    def finish(self, pending: Tensor) -> Tensor:
        """Wait for a collective that `start` has started, and return its result."""
        with self.scope:
            buffer = wait(pending)
        if buffer.is_cuda:
            device_watch.note(self.scope)
        return self.unpack(buffer)

    def __str__(self) -> str:
        return self.scope.what

    def __call__(self, x: Tensor) -> Tensor:
        """Start the collective and wait for its result."""
        return self.finish(self.start(x))


def flat(x: Tensor) -> Tensor:
    """A contiguous 1-d tensor of all elements, with the conjugate and negative bits resolved."""
    if x.is_neg() or x.is_conj():
        x = x.resolve_conj().resolve_neg()
    return x.reshape(-1).contiguous()


def encoded(wire: TransportDtype) -> Callable[[Tensor], Tensor]:
    """What is sent of a tensor in a transport dtype."""
    return Tensor.resolve_neg if wire.is_plain else lambda x: wire.encode(flat(x))


def chunked(wire: TransportDtype, chunks: FlatChunks) -> Callable[[Tensor], Tensor]:
    """What is sent of the chunks of a tensor in a transport dtype."""
    if wire.is_plain and chunks.is_even:
        return lambda x: chunks.rows(x.resolve_neg())
    return lambda x: wire.encode(flat(chunks.flatten(x)))


def exchange_parts(
    place: Member,
    wire: TransportDtype,
    received: list[int],
    sent: list[int],
    arrange: Callable[[Tensor], Tensor],
    unpack: Callable[[Tensor], Tensor],
) -> Exchange:
    """An all_to_all that receives and sends parts with these numbers of elements, in torch's order."""
    receives, sends = (tuple(numel * wire.factor for numel in numels) for numels in (received, sent))
    op = c10d.all_to_all_single.default
    return Exchange(op, (place.name,), arrange, unpack, sends=sends, receives=receives, takes_sizes=True)
