"""A watch on collectives that a device does not finish: it says which ranks are missing, as the host does not wait.

After the timeout of torch.distributed NCCL's own watchdog ends the process (`docs/processes.md`), and no error reaches
Python. It leaves a minute to write its traces, in which this thread asks the failure detector.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch.distributed as dist

from spmd.job import device_launches
from spmd.job.collective_scope import CollectiveScope, failed
from spmd.job.device_launches import DeviceLaunches, Launched
from spmd.job.failure_detector import INTERVAL
from spmd.job.process import timeout_of


def note(scope: CollectiveScope) -> None:
    """Note a collective for which the current stream of this process's GPU waits from now on."""
    global _thread
    device_launches.launches.add(scope.what, scope.ranks)
    if _thread is None:
        _thread = threading.Thread(target=_run, daemon=True, name="spmd-device-watch")
        _thread.start()


_thread: threading.Thread | None = None


def _run() -> None:
    watch, pause = DeviceWatch(device_launches.launches), threading.Event()
    while True:
        pause.wait(INTERVAL)
        watch.look(_limit())


def _limit() -> float:
    """The timeout of the job's collectives, in seconds."""
    world = dist.group.WORLD
    limit = None if world is None else timeout_of(world)
    return float("inf") if limit is None else limit.total_seconds()


class DeviceWatch:
    """Says once of each collective that a device does not finish in time why it fails.

    Args:
        launches: the collectives.
        say: takes the message.
    """

    def __init__(self, launches: DeviceLaunches, say: Callable[[str], object] | None = None) -> None:
        self._launches, self._say = launches, say or _print
        self._told: Launched | None = None

    def look(self, limit: float) -> None:
        """Look for a collective that the device has not finished in so many seconds."""
        late = self._launches.late(limit)
        if late is None or late is self._told:
            return
        self._told = late
        error = failed(
            CollectiveScope(late.what, late.ranks), TimeoutError(f"the device has not finished it in {limit:g} seconds")
        )
        self._say(f"{type(error).__name__}: {error}")


def _print(text: str) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)
