"""Collectives that a device has been given and may not have finished: on a GPU, the host does not wait for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import torch


class DeviceEvent(Protocol):
    """A point in what a device does, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device is past it."""


@attrs.frozen(eq=False)
class Launched:
    """A collective that was launched on a device.

    Args:
        what: the collective and its cause, for messages.
        ranks: those that take part.
        event: where the device has finished it.
        since: when it was launched, by the clock of its `DeviceLaunches`.
    """

    what: str
    ranks: Sequence[int]
    event: DeviceEvent
    since: float


def record() -> DeviceEvent | None:
    """An event in the current stream of the current GPU; None while a CUDA graph is captured, which has no host."""
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class DeviceLaunches:
    """Those collectives of this process that its device may not have finished, in the order of their launches.

    Args:
        record: makes the event of a collective that the current stream waits for; None if there is no such thing.
        clock: the time, in seconds.
    """

    def __init__(
        self, record: Callable[[], DeviceEvent | None] = record, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._record, self._clock = record, clock
        self._launched: deque[Launched] = deque()
        self._lock = threading.Lock()

    def add(self, what: str, ranks: Sequence[int]) -> None:
        """Note a collective that the current stream waits for, and forget those that are finished."""
        event = self._record()
        if event is None:
            return
        with self._lock:
            self._drop_finished()
            self._launched.append(Launched(what, ranks, event, self._clock()))

    def unfinished(self) -> Launched | None:
        """The first collective that the device has not finished."""
        with self._lock:
            self._drop_finished()
            return self._launched[0] if self._launched else None

    def late(self, seconds: float) -> Launched | None:
        """The first that the device has not finished, if it was launched more than so many seconds ago.

        The device is asked only then: a question of another thread would break the capture of a CUDA graph.
        """
        limit = self._clock() - seconds
        with self._lock:
            if not self._launched or self._launched[0].since > limit:
                return None
        found = self.unfinished()
        return None if found is None or found.since > limit else found

    def _drop_finished(self) -> None:
        while self._launched and _is_finished(self._launched[0].event):
            self._launched.popleft()


def _is_finished(event: DeviceEvent) -> bool:
    try:
        return event.query()
    except RuntimeError:  # the device has failed
        return False


launches = DeviceLaunches()
"""Those of this process."""
