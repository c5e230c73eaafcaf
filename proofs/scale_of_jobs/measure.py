"""The life of a rank that is measured: start, first call, save, some seconds of rest, and the death of another one."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

import spmd
from proofs.scale_of_jobs.counted import CountedStore
from spmd import P
from spmd.job import process
from spmd.testing.local_job import local_job

REST = 3.0
"""Seconds of a rank that does nothing, for the operations of its failure detector."""

TIMEOUT = 600.0
"""Seconds that collectives wait, on a machine that all ranks share."""

PHASES = ("start", "first call", "save", "rest", "kill")


@attrs.frozen
class Phase:
    """What one rank has done in a phase.

    Args:
        operations: of the store, by name.
        descriptors: open at the end, beyond those that the process began with.
        seconds: how long it took.
    """

    operations: Counter[str]
    descriptors: int
    seconds: float

    @property
    def total(self) -> int:
        """The number of operations, without `looks`."""
        return sum(self.operations.values()) - self.looks

    @property
    def looks(self) -> int:
        """How often the failure detector has looked for a failure, which depends on the time that the phase took."""
        return self.operations["check"]


@attrs.frozen
class Life:
    """The phases of one rank, and the error by which its last collective failed."""

    phases: dict[str, Phase]
    error: str


def measure(ranks: int) -> dict[int, Life]:
    """The lives of all ranks of a job but the one that is killed, which is the one in the middle."""
    context = multiprocessing.get_context("fork")  # what is imported already need not be read by every rank
    variables = local_job(ranks)
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=_live, args=(rank, ranks, variables, folder)) for rank in range(ranks)]
        for each in started:
            each.start()
        for each in started:
            each.join()
        return {
            rank: pickle.loads(Path(folder, str(rank)).read_bytes())
            for rank in range(ranks)
            if Path(folder, str(rank)).exists()
        }


def killed(ranks: int) -> int:
    """The rank that is killed."""
    return ranks // 2


def _live(rank: int, ranks: int, variables: dict[str, str], folder: str) -> None:
    os.environ.update(variables, RANK=str(rank))
    torch.set_num_threads(1)
    operations: Counter[str] = Counter()
    make = process._store

    def counted(*args: Any) -> CountedStore:
        store = CountedStore(make(*args), operations)
        dist.distributed_c10d._get_default_store = lambda: store  # which would make a clone that does not count
        return store

    process._store = counted  # type: ignore[assignment]
    phases: dict[str, Phase] = {}
    before, start = Counter(operations), time.monotonic()
    inherited = _descriptors()

    def end(name: str) -> None:
        nonlocal before, start
        now = Counter(operations)
        phases[name] = Phase(now - before, _descriptors() - inherited, time.monotonic() - start)
        before, start = Counter(operations), time.monotonic()

    spmd.init(timeout=TIMEOUT)
    mesh = spmd.make_mesh({"data": ranks // 4, "model": 4})
    end("start")
    step, params, x = _model(mesh)
    params = step(params, x)
    end("first call")
    spmd.checkpoint.save(params, Path(folder, "checkpoint"))
    end("save")
    time.sleep(REST)
    end("rest")
    if rank == killed(ranks):
        os.kill(os.getpid(), signal.SIGKILL)
    error = ""
    try:
        while True:
            params = step(params, x)
    except spmd.SpmdError as failure:
        error = str(failure)
    end("kill")
    Path(folder, str(rank)).write_bytes(pickle.dumps(Life(phases, error)))


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _model(mesh: spmd.Mesh) -> tuple[Any, Any, Any]:
    """A training step of two layers, by data and tensor parallelism, its parameters and its batch."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ params["up"]) @ params["down"]).square().mean()

    def train(params: Any, x: torch.Tensor) -> Any:
        grads = torch.func.grad(loss)(params, x)
        return {name: params[name] - 0.01 * grads[name] for name in params}

    specs = {"up": P(None, "model"), "down": P("model")}
    params = spmd.distribute({"up": torch.ones(8, 16), "down": torch.ones(16, 8)}, specs, mesh)
    x = spmd.distribute(torch.ones(4 * mesh.size, 8), P("data"), mesh)
    # The constants of a machine are given: who has them measured runs an all_to_all over all ranks.
    step = spmd.jit(train, (specs, P("data")), specs, mesh=mesh, machine=spmd.Machine())
    return step, params, x
