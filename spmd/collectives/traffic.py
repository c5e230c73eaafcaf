"""The collectives that virtual ranks run, with the bytes that each rank sends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import attrs


@attrs.frozen
class Transfer:
    """One collective that ran: its kind, its mesh axes, and the bytes that each rank sent, by rank."""

    kind: str
    axes: tuple[str, ...]
    sent: tuple[int, ...]


@attrs.define
class Traffic:
    """The collectives that ran inside a `record_traffic` block, in order."""

    transfers: list[Transfer] = attrs.field(factory=list)

    def record(self, kind: str, axes: Sequence[str], sent: Sequence[int]) -> None:
        """Add a collective that ran; the arguments are the fields of `Transfer`."""
        self.transfers.append(Transfer(kind, tuple(axes), tuple(sent)))

    def sent(self, kind: str | None = None) -> float:
        """Bytes sent per rank (the mean over ranks) by all collectives, or by those of one kind."""
        chosen = [transfer for transfer in self.transfers if kind in (None, transfer.kind)]
        return math.fsum(sum(transfer.sent) / len(transfer.sent) for transfer in chosen)


_traffic: ContextVar[Traffic | None] = ContextVar("spmd_traffic", default=None)


@contextlib.contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Record the collectives that the virtual runtime runs inside the `with` block, and the bytes that they send.

    >>> with record_traffic() as traffic:
    ...     pass
    >>> traffic.sent()
    0.0
    """
    traffic = Traffic()
    token = _traffic.set(traffic)
    try:
        yield traffic
    finally:
        _traffic.reset(token)


def active_traffic() -> Traffic | None:
    """The record of the innermost `record_traffic` block, if there is one."""
    return _traffic.get()
