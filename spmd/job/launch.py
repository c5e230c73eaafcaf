"""Worker processes on this machine, started from a script or a notebook."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from spmd.errors import MeshError, SpmdError
from spmd.job.background import wait_for_all
from spmd.job.failure_detector import announce
from spmd.job.process import is_distributed

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_Result = TypeVar("_Result")


def launch(function: Callable[..., _Result], nprocs: int, *args: object) -> _Result:
    """Call a function in several processes of this machine, as the ranks of one distributed job.

    What torchrun is for a script: inside, `make_mesh({"data": nprocs})` gives a distributed mesh. Ranks are started by
    torch's elastic launcher, and are gone when the call returns. A script calls it under `if __name__ == "__main__"`.

    Args:
        function: what every rank calls. Processes import it by its module and name; from a notebook, where that is not
            possible, they are forks.
        nprocs: how many; of GPUs, one a process.
        args: its arguments; they are pickled.

    Returns:
        What the function returns on rank 0. DTensors stay with their rank: return `x.full_tensor()`.

    Raises:
        SpmdError: the function or an argument cannot be pickled; or the function failed on some rank, with the
            traceback of the first that did.
        MeshError: a number of processes below 1, or a process that is itself one of a distributed job.

    >>> launch(max, 2, 3, 4)  # doctest: +SKIP
    4
    """
    if not isinstance(nprocs, int) or nprocs < 1:
        raise MeshError(f"launch needs a positive number of processes (got {nprocs!r}).")
    if is_distributed():
        raise MeshError(
            "launch was called in a process of a distributed job. Call it in the process that starts the job."
        )
    if not _is_interactive(function):
        try:
            pickle.dumps((function, args))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise SpmdError(
                f"launch cannot send {_name(function)} and its arguments to other processes: {error}. Define the "
                "function at the top of a module, and pass it by its name."
            ) from None
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nprocs,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork" if _is_interactive(function) else "spawn",
    )
    with tempfile.TemporaryDirectory(prefix="spmd-launch-") as folder:
        try:
            results = elastic_launch(config, _rank)(function, args, folder)
        except ChildFailedError as error:
            rank, reason = _first_failure(error.failures, Path(folder))
            raise SpmdError(f"Rank {rank} of {nprocs} failed in {_name(function)}:\n{reason}") from None
    return pickle.loads(results[0])


def _rank(function: Callable[..., Any], args: tuple[Any, ...], folder: str) -> bytes:
    """The life of a rank; its result as bytes, which outlive it."""
    torch.set_num_threads(1)  # ranks share the machine, and threads do not survive a fork
    # A fork has the launcher's handler, which waits for Python, and with it for whatever this rank waits for.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        result = function(*args)
        wait_for_all()
    except BaseException as error:
        when = time.time_ns()
        announce(error)
        Path(folder, os.environ["RANK"]).write_text(f"{when}\n{traceback.format_exc()}")
        raise
    if dist.is_initialized():
        rank = dist.get_rank()
        dist.destroy_process_group()
        result = result if rank == 0 else None
    return pickle.dumps(result)


def _is_interactive(function: Callable[..., Any]) -> bool:
    """Whether a function was written where other processes cannot import it, as in a notebook."""
    return getattr(function, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__")


def _first_failure(failures: Mapping[int, ProcessFailure], folder: Path) -> tuple[int, str]:
    """The rank that failed first, and why: other ranks fail because it did, and may be seen to exit before it.

    A rank that was killed leaves no record of its own; SIGTERM is what the launcher sends to those that are left.
    """
    for rank, failure in sorted(failures.items()):
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and not (folder / str(rank)).exists():
            return rank, failure.message
    records = []
    for path in folder.iterdir():
        when, _, reason = path.read_text().partition("\n")
        records.append((int(when), int(path.name), reason))
    if records:
        _, rank, reason = min(records)
        return rank, reason
    rank = min(failures)
    return rank, failures[rank].message


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
