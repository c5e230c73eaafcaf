"""Collectives as scopes: where ranks wait for each other, and the error when one of them does not arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType

import attrs

from spmd.errors import DivergenceError, SpmdError
from spmd.job import failure_detector
from spmd.job.failure_detector import AWAY, FAILED, WAITS


@attrs.frozen
class CollectiveScope:
    """A collective: a context manager around what waits for the other ranks.

    Args:
        what: the collective and its cause, for messages; the same on all ranks that take part.
        ranks: those that take part.

    Raises:
        SpmdError: the collective failed; the message has which ranks are missing, or what became of them.
        DivergenceError: ranks wait for each other in different collectives.
    """

    what: str
    ranks: Sequence[int]

    def __enter__(self) -> None:
        failure_detector.waits_in = self.what

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if isinstance(error, RuntimeError):
                raise failed(self, error) from error
        finally:
            failure_detector.waits_in = None


def failed(scope: CollectiveScope, error: BaseException) -> SpmdError:
    """The error of a collective that failed: reports the failure, and says what the other ranks report."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    detector = failure_detector.current()
    if detector is None:
        return SpmdError(f"{scope.what} failed: {reason}")
    said = detector.ask(f"{WAITS}{scope.what}")
    if said is None:
        return SpmdError(
            f"{scope.what} failed: rank 0 or the launcher, which keeps the store of torch.distributed, does not "
            f"answer. ({reason})"
        )
    return explain(scope, said, reason)


def explain(scope: CollectiveScope, said: Sequence[str | None], reason: str) -> SpmdError:
    """The error of a collective that failed.

    Args:
        scope: the collective.
        said: the report of each rank; None if it does not answer.
        reason: what torch says of the failure.
    """
    what = scope.what
    ends = [f"rank {rank} {text}" for rank, text in enumerate(said) if text and text.startswith(FAILED)]
    if ends:
        return SpmdError(f"{what} failed, because {'; '.join(ends)}")
    missing = [rank for rank, text in enumerate(said) if text is None]
    if missing:
        verb = "does" if len(missing) == 1 else "do"
        return SpmdError(
            f"{what} failed: {name_ranks(missing)} {verb} not answer. A rank that does not answer was killed or "
            f"stopped, or cannot be reached. ({reason})"
        )
    away = [f"rank {rank} {text}" for rank, text in enumerate(said) if text and text.startswith(AWAY)]
    if away:
        return SpmdError(f"{what} failed: {'; '.join(away)}. ({reason})")
    places = {rank: said[rank] or "" for rank in scope.ranks}
    if len(set(places.values())) > 1:
        return DivergenceError(
            f"Ranks wait for each other in different places: {who_says_what(places)}. All ranks must make the same "
            f"calls in the same order. ({reason})"
        )
    return SpmdError(f"{what} failed, although all ranks are there: {reason}")


def who_says_what(said: dict[int, str]) -> str:
    """What was said, and by which ranks.

    >>> who_says_what({0: "f32[2]", 1: "f32[3]", 2: "f32[2]"})
    'f32[2] on ranks 0, 2; f32[3] on rank 1'
    """
    texts = dict.fromkeys(said.values())
    return "; ".join(f"{text} on {name_ranks(rank for rank, other in said.items() if other == text)}" for text in texts)


def name_ranks(ranks: Iterable[int]) -> str:
    """Some ranks, in words.

    >>> name_ranks([3]), name_ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    names = [str(rank) for rank in ranks]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"
