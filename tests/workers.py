"""Processes that tests of the distributed runtime share: the ranks of one job after another."""

from __future__ import annotations

import functools
import gc
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=240)
"""How long a collective waits in a worker: on a busy machine, ranks import modules for minutes."""

CALL_TIMEOUT = 300.0
"""Seconds after which a call that does not come back is given up, and the workers with it."""


def call_on_mesh(function: Callable[..., Any], axes: dict[str, int], runtime: str, *args: Any) -> Any:
    """`function(*args, mesh)` with a new mesh."""
    from spmd.core.mesh import make_mesh

    return function(*args, make_mesh(axes, runtime=runtime))


class WorkerError(Exception):
    """A function failed in a worker; the message has its rank and its traceback."""


class Workers:
    """Worker processes on gloo, started when they are first needed.

    A context manager: at its end they are stopped.

    Args:
        context: starts the processes.

    >>> with Workers(multiprocessing.get_context("spawn")) as workers:  # doctest: +SKIP
    ...     workers.run(pow, 2, 3, ranks=2)
    [8, 8]
    """

    def __init__(self, context: BaseContext) -> None:
        self._context = context
        self._started: list[tuple[Any, Connection]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="spmd-workers-")
        self._job, self._jobs = 0, 0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._directory.cleanup()

    def run(self, function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
        """Call a function, which workers can import, in as many of them as there are ranks; all its results.

        Raises:
            WorkerError: it failed on some rank, or did not come back; the other ranks are stopped too.
        """
        while len(self._started) < ranks:
            self._start()
        if ranks != self._job:
            self._job, self._jobs = ranks, self._jobs + 1
        store = Path(self._directory.name) / f"job{self._jobs}"
        task = pickle.dumps((function, args, ranks, store.as_uri()))
        connections = [connection for _, connection in self._started[:ranks]]
        for connection in connections:
            connection.send_bytes(task)
        answers = [self._answer(rank, connection) for rank, connection in enumerate(connections)]
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
        if failures:
            self.stop()
            raise WorkerError("\n".join(failures))
        return [result for _, result in answers]

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, len(self._started)), daemon=True)
        process.start()
        theirs.close()
        self._started.append((process, ours))

    def _answer(self, rank: int, connection: Connection) -> tuple[str | None, Any]:
        try:
            if connection.poll(CALL_TIMEOUT):
                return pickle.loads(connection.recv_bytes())
            return f"no answer in {CALL_TIMEOUT:.0f} s", None
        except (EOFError, ConnectionError):
            return "the process died", None

    def stop(self) -> None:
        """Stop all workers; later calls start others."""
        for process, connection in self._started:
            connection.close()
            process.kill()
            process.join()
        self._started.clear()
        self._job = 0


def plan_for_the_default_machine() -> None:
    """Plan as for virtual ranks, because measured constants vary, and plans and the order of sums with them."""
    from spmd.plan.machine import default, machine

    default._saved = functools.wraps(default._saved)(lambda *_: machine.Machine())


def _serve(connection: Connection, rank: int) -> None:
    """The life of a worker: calls come, answers go."""
    torch.set_num_threads(1)
    gc.freeze()  # what is imported, as in tests/conftest.py
    gc.set_threshold(10_000, 20, 50)
    plan_for_the_default_machine()
    job = ""
    while True:
        try:
            function, args, ranks, store = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            if store != job:
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group(
                    "gloo", init_method=store, rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT
                )
                job = store
            answer: tuple[str | None, Any] = (None, function(*args))
        except BaseException:
            answer = (traceback.format_exc(), None)
        connection.send_bytes(pickle.dumps(answer))
