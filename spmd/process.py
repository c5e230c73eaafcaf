"""This process among those of a distributed job: starting torch.distributed, its rank, its device."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from spmd.errors import MeshError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, and other launchers in its manner, set for each process."""


def is_distributed() -> bool:
    """Whether this process belongs to a distributed job: it started torch.distributed, or a launcher started it."""
    return dist.is_initialized() or all(name in os.environ for name in VARIABLES)


def init(*, timeout: timedelta | float | None = None) -> None:
    """Start torch.distributed from torchrun's variables: gloo for CPU tensors and, where there are GPUs, NCCL.

    `make_mesh(runtime="distributed")` does this; call it first to choose a timeout. What is started already is left
    alone.

    Args:
        timeout: how long a collective may wait for the other ranks, in seconds or as a timedelta; by default torch's.

    Raises:
        MeshError: a launcher's variables are missing; a timeout that is not positive, or that comes too late.
    """
    limit = _parse_timeout(timeout)
    if dist.is_initialized():
        if limit is not None:
            raise MeshError(
                "init(timeout=...) came after torch.distributed was started. Call it before the first make_mesh, or "
                "give the timeout to torch.distributed.init_process_group."
            )
        return
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise MeshError(
            f"A distributed mesh needs the variables that torchrun sets (missing: {', '.join(missing)}). Start the "
            "script by `torchrun --nproc-per-node 8 script.py`, or take runtime='virtual' in one process."
        )
    atexit.register(_leave)
    if not _is_restarted():
        dist.init_process_group(timeout=limit)
        return
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=limit or default_pg_timeout)))
    attempt = dist.PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(store=attempt, rank=rank, world_size=size, timeout=limit)


def _leave() -> None:
    """End what `init` started while the interpreter is whole: left to its end, gloo's threads can abort the process.

    Not after an error, when collectives may be under way that nobody will answer.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def _is_restarted() -> bool:
    """Whether torchrun has started this job once more on its one machine.

    Its processes then find the addresses of the dead ones in torchrun's store, unless they look under other names:
    https://github.com/pytorch/pytorch/issues/135712. Jobs of several machines do not count restarts alike.
    """
    is_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return is_again and os.environ.get("GROUP_WORLD_SIZE") == "1"


def _parse_timeout(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None:
        return None
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise MeshError(f"timeout must be positive (got {timeout!r}).")
    return limit


def process_count() -> int:
    """The number of processes of the job; 1 outside of one. JAX's `jax.process_count`."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if is_distributed() else 1


def process_index() -> int:
    """The rank of this process; 0 outside of a distributed job. JAX's `jax.process_index`."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if is_distributed() else 0


def choose_device(device: torch.device) -> torch.device:
    """The device of a mesh whose ranks are processes: of several GPUs, each process takes the one of its local rank.

    The result has no index, so that it is the same on all ranks; the process's current device says which one it is.

    Raises:
        MeshError: fewer GPUs than processes on this machine.
    """
    if device.type != "cuda":
        return device
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise MeshError(
            f"Rank {process_index()} wants GPU {index}, but there are {torch.cuda.device_count()} here. Start at most "
            "one process a GPU, or pass device='cpu'."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda")
