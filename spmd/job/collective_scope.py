"""Collectives as scopes: where ranks wait for each other, and the error when one of them does not arrive."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType

import attrs
import torch
import torch.distributed as dist

from spmd import errors
from spmd.errors import DivergenceError, SpmdError
from spmd.job import calling_thread, failure_detector
from spmd.job.failure_detector import AWAY, ENDED, FAILED, IN_TURN, WAITS, Interrupted, Reported

MOST = 16
"""How many ranks a message names."""


@attrs.frozen
class CollectiveScope:
    """A collective: a context manager around what waits for the other ranks.

    Args:
        what: the collective and its cause, for messages; the same on all ranks that take part.
        ranks: those that take part, by their numbers in the job.
        mesh: the ranks whose failures can be why one of them does not arrive; by default those that take part.

    Raises:
        SpmdError: the collective failed; the message has which ranks are missing, or what became of them.
        DivergenceError: ranks wait for each other in different collectives.
    """

    what: str
    ranks: Sequence[int]
    mesh: Sequence[int] = ()

    def __enter__(self) -> None:
        calling_thread.enter(self.what)
        failure_detector.position = self.what

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            failure_detector.position = None
            calling_thread.leave()
            return
        with suppress(SpmdError):  # the first error is raised
            calling_thread.leave()
        if not is_of_torch_distributed(error):
            failure_detector.position = Interrupted(f"{_first_line(error)} in {self.what}")
            return
        failure = failed(self, error)
        failure_detector.position = Interrupted(_first_line(failure))
        raise failure from error


def is_of_torch_distributed(error: BaseException) -> bool:
    """Whether torch.distributed raised an error, and not what else runs while a collective does.

    Backends raise a RuntimeError of no more special type. So do the allocator of the CPU, and handlers of signals, such
    as that of a DataLoader whose worker was killed; but these are Python, and the innermost frame is theirs.
    """
    if isinstance(error, dist.DistError):
        return True
    if type(error) is not RuntimeError or "DefaultCPUAllocator" in str(error):
        return False
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    file = innermost.f_code.co_filename
    return file.startswith(_LIBRARIES) and not file.startswith(_LOADERS)


_LIBRARIES = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, errors.__file__))
_LOADERS = os.path.join(_LIBRARIES[0], "utils", "data")


def failed(scope: CollectiveScope, error: BaseException) -> SpmdError:
    """The error of a collective that failed: reports the failure, and says what the other ranks report."""
    reason = _first_line(error)
    detector = failure_detector.current()
    if detector is None:
        return _of_others(SpmdError(f"{scope.what} failed: {reason}"))
    position = failure_detector.position
    if isinstance(position, Reported) and position.what == scope.what:
        said = detector.hear(position.round)
    else:
        said = detector.ask(f"{WAITS}{scope.what}")
    if said is None:
        return _of_others(
            SpmdError(
                f"{scope.what} failed: rank 0 or the launcher, which keeps the store of torch.distributed, does not "
                f"answer. ({reason})"
            )
        )
    return _of_others(explain(scope, said, reason))


def explain(scope: CollectiveScope, said: Sequence[str | None], reason: str) -> SpmdError:
    """The error of a collective that failed.

    Args:
        scope: the collective.
        said: the report of each rank; None if it does not answer.
        reason: what torch says of the failure.
    """
    what, near = scope.what, {rank: said[rank] for rank in scope.mesh or scope.ranks}
    if failure := _failure(what, near, reason):
        return failure
    in_turn = {rank: text for rank, text in near.items() if str(text).startswith(IN_TURN)}
    first = {rank: text for rank, text in near.items() if rank not in in_turn}
    for gone in (_beginning_with(ENDED, first), _beginning_with(AWAY, first)):
        if gone:
            return SpmdError(f"{what} failed: {gone}. ({reason})")
    places = {rank: str(said[rank]) for rank in scope.ranks}
    elsewhere = in_turn or len(set(places.values())) > 1  # some may have waited for a rank outside of the mesh
    if elsewhere and (failure := _failure(what, dict(enumerate(said)), reason)):
        return failure
    if in_turn:
        return SpmdError(f"{what} failed: {_beginning_with(IN_TURN, in_turn)}. ({reason})")
    if len(set(places.values())) > 1:
        return DivergenceError(
            f"Ranks wait for each other in different places: {who_says_what(places)}. All ranks must make the same "
            f"calls in the same order. ({reason})"
        )
    return SpmdError(f"{what} failed, although all ranks are there: {reason}")


def _failure(what: str, said: Mapping[int, str | None], reason: str) -> SpmdError | None:
    """The error of a collective if ranks have failed, or do not answer; None if all do."""
    if failures := _beginning_with(FAILED, said):
        return SpmdError(f"{what} failed, because {failures}")
    missing = [rank for rank, text in said.items() if text is None]
    if not missing:
        return None
    verb = "does" if len(missing) == 1 else "do"
    return SpmdError(
        f"{what} failed: {name_ranks(missing)} {verb} not answer. A rank that does not answer was killed or "
        f"stopped, or cannot be reached. ({reason})"
    )


def _beginning_with(beginning: str, said: Mapping[int, str | None]) -> str:
    """Which ranks say what begins so."""
    texts = dict.fromkeys(text for text in said.values() if text is not None and text.startswith(beginning))
    return "; ".join(f"{name_ranks(rank for rank in said if said[rank] == text)} {text}" for text in texts)


def _of_others(error: SpmdError) -> SpmdError:
    """The error, marked as one of which another rank is the cause."""
    error.is_of_others = True
    return error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def who_says_what(said: Mapping[int, str]) -> str:
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
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > MOST:
        names = [*names[: MOST - 1], f"and {len(names) - MOST + 1} others"]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"
