"""What the processes of a job tell each other when something goes wrong, through the store of torch.distributed.

A collective that fails says nothing of why: a rank may have died, be stuck in the user's code, or wait in another
collective. So each process has a thread that looks, twice a second, whether somebody has raised the alarm, and then
says where its own main thread is. A process that has died, or was stopped, says nothing; neither does anyone while all
is well.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TypeAlias

import attrs
import torch.distributed as dist

from spmd.errors import DivergenceError, SpmdError
from spmd.user_file import is_user_file

INTERVAL = 0.5
"""Seconds between two looks at the alarm."""

PATIENCE = 3.0
"""Seconds that the others have to say where they are."""

_Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@attrs.frozen
class Meeting:
    """A collective: a context manager around what waits for the other ranks.

    Args:
        what: the collective and its cause, for messages; ranks that meet say the same.
        ranks: those that take part.

    Raises:
        SpmdError: the collective failed; the message has which ranks are missing, or what became of them.
        DivergenceError: ranks wait for each other in different collectives.
    """

    what: str
    ranks: Sequence[int]

    def __enter__(self) -> None:
        global _meeting
        _meeting = self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        global _meeting
        try:
            if isinstance(error, RuntimeError):
                raise failed(self, error) from error
        finally:
            _meeting = None


_meeting: Meeting | None = None
"""Where the main thread waits for others."""


def failed(meeting: Meeting, error: BaseException) -> SpmdError:
    """The error of a collective that failed: raises the alarm, and tells what the others say."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    peers = _current()
    if peers is None:
        return SpmdError(f"{meeting.what} failed: {reason}")
    said = peers.ask(f"{_WAITS}{meeting.what}")
    if said is None:
        return SpmdError(
            f"{meeting.what} failed: rank 0 or the launcher, which keeps the store of torch.distributed, does not "
            f"answer. ({reason})"
        )
    return explain(meeting, said, reason)


def explain(meeting: Meeting, said: Sequence[str | None], reason: str) -> SpmdError:
    """The error of a collective that failed.

    Args:
        meeting: the collective.
        said: what each rank has said of where it is; None if it does not answer.
        reason: what torch says of the failure.
    """
    what = meeting.what
    ends = [f"rank {rank} {text}" for rank, text in enumerate(said) if text and text.startswith(_FAILED)]
    if ends:
        return SpmdError(f"{what} failed, because {'; '.join(ends)}")
    missing = [rank for rank, text in enumerate(said) if text is None]
    if missing:
        verb = "does" if len(missing) == 1 else "do"
        return SpmdError(
            f"{what} failed: {name_ranks(missing)} {verb} not answer. A rank that does not answer was killed or "
            f"stopped, or cannot be reached. ({reason})"
        )
    away = [f"rank {rank} {text}" for rank, text in enumerate(said) if text and text.startswith(_AWAY)]
    if away:
        return SpmdError(f"{what} failed: {'; '.join(away)}. ({reason})")
    places = {rank: said[rank] or "" for rank in meeting.ranks}
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


_FAILED, _AWAY, _WAITS = "failed: ", "is in no collective, ", "waits in "


def watch() -> None:
    """Answer the alarms of the job that torch.distributed runs now; and if this process fails, tell the others why."""
    world = dist.group.WORLD
    if world is None or world.size() == 1 or world in _jobs:
        return
    with suppress(AttributeError, NotImplementedError, RuntimeError):  # a store of the user's that cannot be shared
        _jobs[world] = _Peers(world)
    if not getattr(sys.excepthook, "is_spmd", False):
        sys.excepthook = _announcing(sys.excepthook)


def announce(error: BaseException) -> None:
    """Tell the others that this process ends, and by which error."""
    peers = _current()
    if peers is not None:
        peers.ask(f"{_FAILED}{type(error).__name__}: {error}")


# torch has one job in a process at a time, and what is known of it goes with it.
_jobs: weakref.WeakKeyDictionary[dist.ProcessGroup, _Peers] = weakref.WeakKeyDictionary()


def _current() -> _Peers | None:
    world = dist.group.WORLD
    return None if world is None else _jobs.get(world)


class _Peers:
    """The processes of a job, as one of them sees them: a thread of its own waits for the alarm, and then listens."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._world = weakref.ref(world)
        store = dist.distributed_c10d._get_default_store()
        # a connection of its own, for one that waits keeps others from using it
        self._store = dist.PrefixStore("spmd", store.clone())  # type: ignore[attr-defined]  # missing in the stubs
        self._rank, self._names = world.rank(), [f"rank{rank}" for rank in range(world.size())]
        self._keeps_store = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._text = ""
        self._said: list[str | None] | None = None
        self._has_asked, self._has_heard = threading.Event(), threading.Event()
        threading.Thread(target=self._run, daemon=True, name="spmd-peers").start()

    def ask(self, text: str) -> list[str | None] | None:
        """Where all ranks are, of an alarm that this process raises if nobody has yet.

        Args:
            text: where this process is.

        Returns:
            What each rank says, None for those that do not answer; None if the store does not.
        """
        self._text = text
        self._has_asked.set()
        self._has_heard.wait(2 * PATIENCE)  # the store may be gone, and with it the thread
        return self._said

    def _run(self) -> None:
        with suppress(Exception):  # the store ends with the process that keeps it
            while not self._has_asked.is_set() and not self._store.check(["alarm"]):
                self._has_asked.wait(INTERVAL)
                if dist.group.WORLD is not self._world():
                    return
            self._listen()
        self._has_heard.set()

    def _listen(self) -> None:
        """Say where this process is, and hear where the others are."""
        store, deadline = self._store, time.monotonic() + PATIENCE
        store.set(self._names[self._rank], self._text or _whereabouts())
        store.set("alarm", "")
        _wait_for(store, self._names, deadline)
        said = [store.get(name).decode() if store.check([name]) else None for name in self._names]
        store.set(f"{self._names[self._rank]} has heard", "")
        self._said = said
        if self._keeps_store:  # it may end with this process
            answered = [name for name, text in zip(self._names, said, strict=True) if text]
            _wait_for(store, [f"{name} has heard" for name in answered], deadline + INTERVAL)


def _wait_for(store: dist.Store, names: list[str], deadline: float) -> None:
    while not store.check(names) and time.monotonic() < deadline:
        time.sleep(0.05)


def _whereabouts() -> str:
    meeting = _meeting
    if meeting is not None:
        return f"{_WAITS}{meeting.what}"
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    line = f"at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "at no line of the user's"
    return f"{_AWAY}{line}"


def _announcing(hook: _Hook) -> _Hook:
    """A hook for exceptions that nobody catches: it does what the last one did, and tells the others."""

    def announcing(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        hook(kind, error, traceback)
        if isinstance(error, Exception):  # who interrupts a job does not want to wait
            announce(error)

    announcing.is_spmd = True  # type: ignore[attr-defined]
    return announcing
