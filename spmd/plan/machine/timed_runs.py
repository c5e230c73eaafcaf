"""The seconds of runs that all ranks of a mesh make at the same time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist

from spmd.collectives.distributed.agreement import gather, spans_processes
from spmd.collectives.transport.process_groups import group_for
from spmd.core.mesh import Mesh

Run: TypeAlias = Callable[[], object]

_Key = TypeVar("_Key", bound=Hashable)

_BLOCKS, _BLOCK = 4, 5e-3
"""How many blocks of runs are timed, and seconds of each."""


def once(mesh: Mesh, run: Run) -> float:
    """Seconds of one run."""
    begin = time.perf_counter()
    run()
    _synchronize(mesh)
    return time.perf_counter() - begin


def once_on_processors(mesh: Mesh, run: Run, *, sharing: float) -> float:
    """Seconds that one run keeps processors from other work.

    Args:
        mesh: the mesh.
        run: the run.
        sharing: ranks for each processor. Where they share it, what other threads of theirs do delays them, too.
    """
    thread, process = time.thread_time(), time.process_time()
    run()
    return max(time.thread_time() - thread, sharing * (time.process_time() - process))


def on_average(mesh: Mesh, run: Run, *, sharing: float) -> float:
    """Mean seconds of a run in a block of them, for runs that do not communicate.

    Where ranks share processors, these are seconds of a processor times the ranks that share it: how much of a short
    block falls into the time slices of others is chance.

    Args:
        mesh: the mesh.
        run: the run.
        sharing: ranks for each processor.
    """
    seconds, each = (time.process_time, sharing) if sharing > 1 else (time.perf_counter, 1.0)
    begin, runs = seconds(), 0
    while True:
        for _ in range(max(runs, 1)):  # an accelerator only queues them
            run()
        runs = max(2 * runs, 1)
        _synchronize(mesh)
        taken = seconds() - begin
        if taken > _BLOCK:
            return each * taken / runs


def apart(mesh: Mesh, run: Run, *, sharing: float) -> float:
    """Median seconds of a run that other ranks may not make, or make at another time: of the means of some blocks."""
    run()
    return statistics.median(on_average(mesh, run, sharing=sharing) for _ in range(_BLOCKS))


def in_turns(
    mesh: Mesh, runs: Mapping[_Key, Run], rounds: int, timed: Callable[[Mesh, Run], float] = once
) -> list[dict[_Key, float]]:
    """The seconds of runs in so many rounds, after one more; all ranks start each run together."""

    def started(run: Run) -> float:
        start(mesh)
        return timed(mesh, run)

    return [{key: started(run) for key, run in runs.items()} for _ in range(1 + rounds)][1:]


def medians(rounds: list[dict[_Key, float]]) -> dict[_Key, float]:
    """The median seconds of each run."""
    return {key: statistics.median(seconds[key] for seconds in rounds) for key in rounds[0]}


def agreed(mesh: Mesh, seconds: Mapping[_Key, float]) -> dict[_Key, float]:
    """The median over all ranks of each number of theirs; a number that a rank lacks is infinite there."""
    of_ranks = gather(f"the measurement of {mesh}", dict(seconds), mesh.ranks)
    return {key: statistics.median(of.get(key, math.inf) for of in of_ranks) for key in of_ranks[0]}


def repeated(count: int, *runs: Run) -> Run:
    """Some runs, one after the other, so many times."""

    def many() -> None:
        for _ in range(count):
            for run in runs:
                run()

    return many


def start(mesh: Mesh) -> None:
    """Wait until all ranks are here and their devices idle."""
    _synchronize(mesh)
    if spans_processes(mesh):
        dist.barrier(group=group_for("measurements", mesh.ranks))


def _synchronize(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
