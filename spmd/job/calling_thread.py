"""Which thread is in a collective call: with two at once, ranks would exchange tensors of different calls."""

from __future__ import annotations

import threading

from spmd.errors import SpmdError
from spmd.job import failure_detector

_turn = threading.RLock()
_clash: list[str] = []  # the message, once two threads have met


def enter(what: str) -> None:
    """Begin a collective call, or a part of one, in this thread; `leave` must follow.

    Raises:
        SpmdError: another thread is in one, or two have met before: the ranks no longer know what they wait for. The
            other ranks are told.
    """
    if not _turn.acquire(blocking=False):
        _clash.append(
            f"Two threads of this process are in collective calls at once: {threading.current_thread().name!r} calls "
            f"{what} while another one is in such a call. Ranks would exchange the tensors of different calls. Make "
            "collective calls from one thread, or one after the other under a threading.Lock that puts them in the "
            "same order on all ranks."
        )
        error = SpmdError(_clash[0])
        failure_detector.announce(error)
        raise error
    if _clash:
        _turn.release()
        raise SpmdError(_clash[0])


def leave() -> None:
    """End what `enter` began.

    Raises:
        SpmdError: another thread has tried meanwhile, so that results may be wrong.
    """
    _turn.release()
    if _clash:
        raise SpmdError(_clash[0])
