"""What code sends outside of `jit`: the collectives that ran, each with its cause and the line of the code."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

import attrs

from spmd.collectives.resharding import eager_redistribution
from spmd.core.spec import DTensorSpec
from spmd.errors import PlanError
from spmd.ir.comm import Comm
from spmd.tracing.source import user_source, where

if TYPE_CHECKING:
    from spmd.plan.cost.suspicious_moves import SuspiciousMove


@attrs.define
class CommRecord:
    """The collectives that ran in a `comms_of` context, in order.

    Args:
        comms: each with its cause, its line and the most bytes that any rank sends; seconds are not predicted.
        suspicious_moves: those that move far more than comes of them, as of a plan (`Plan.suspicious_moves`). Outside
            of `jit` a plan is that of one operator.
    """

    comms: list[Comm] = attrs.field(factory=list)
    suspicious_moves: list[SuspiciousMove] = attrs.field(factory=list)

    @property
    def bytes(self) -> float:
        """The sum of the bytes of all collectives."""
        return sum(comm.bytes for comm in self.comms)

    def count(self) -> dict[str, int]:
        """The number of collectives of each kind."""
        return dict(collections.Counter(comm.kind for comm in self.comms))

    def __str__(self) -> str:
        total = f"{len(self.comms)} collectives, {self.bytes:,.0f} bytes"
        moves = (f"  suspicious: {move}" for move in self.suspicious_moves)
        return "\n".join([total, *(f"  {comm}" for comm in self.comms), *moves])


@attrs.frozen
class _Recording:
    record: CommRecord
    error: bool


_watches: ContextVar[tuple[_Recording, ...]] = ContextVar("spmd_comms_of", default=())


@contextlib.contextmanager
def comms_of(*, error: bool = False) -> Iterator[CommRecord]:
    """A context that records the collectives of all that runs in it: operators on DTensors, calls of jitted functions,
    `redistribute`, and reading values (`full_tensor`, `item`), which is an all_gather or a reduction.

    What a virtual mesh would send on a cluster is recorded there, too.

    Args:
        error: refuse instead: whatever would communicate raises before anything is sent.

    Raises:
        PlanError: with `error`, at the first call that communicates; it names the collectives, their causes and lines.

    >>> import torch
    >>> from spmd import P, distribute, make_mesh
    >>> x = distribute(torch.ones(4), P("data"), make_mesh({"data": 2}, runtime="virtual"))
    >>> with comms_of() as ran:
    ...     y = x + 1
    ...     total = y.sum()
    >>> ran.count(), ran.bytes
    ({'all_reduce': 1}, 4.0)
    """
    watch = _Recording(CommRecord(), error)
    token = _watches.set((*_watches.get(), watch))
    try:
        yield watch.record
    finally:
        _watches.reset(token)


def is_watched() -> bool:
    """Whether a `comms_of` context is open."""
    return bool(_watches.get())


def record_comms(comms: Iterable[Comm], call: str, suspicious: Iterable[SuspiciousMove] = ()) -> None:
    """Record collectives that are about to run, in all open contexts.

    Args:
        comms: the collectives.
        call: the call that runs them, for the error.
        suspicious: those of them that are suspicious moves.
    """
    comms, suspicious = list(comms), list(suspicious)
    for watch in _watches.get() if comms else ():
        if watch.error:
            listed = "\n".join(f"  {comm}" for comm in comms)
            raise PlanError(
                f"{call} at {where(user_source())} communicates, under spmd.comms_of(error=True):\n{listed}"
            )
        watch.record.comms += comms
        watch.record.suspicious_moves += suspicious


def record_program(comms: Iterable[Comm], call: str, suspicious: Iterable[SuspiciousMove] = ()) -> None:
    """Record the collectives of a program that is cached for calls at any line: they get the line of this call."""
    source = user_source()
    moves = (attrs.evolve(move, comm=attrs.evolve(move.comm, source=source)) for move in suspicious)
    record_comms((attrs.evolve(comm, source=source) for comm in comms), call, moves)


def record_move(call: str, source: DTensorSpec, target: DTensorSpec) -> None:
    """Record the collectives of a redistribution."""
    steps = [step for step in eager_redistribution(source, target) if step.is_collective]
    cause = f"{source.pspec!r} -> {target.pspec!r} by {call}"
    record_program([Comm(step.kind, step.axes, step.bytes, 0.0, cause, None) for step in steps], call)
