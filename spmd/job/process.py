"""This process among those of a distributed job: starting torch.distributed, its rank, its device."""

from __future__ import annotations

import atexit
import os
import sys
import time
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported while a job runs, its defaults would keep the job's group for ever
from torch.distributed.constants import default_pg_timeout

if sys.platform != "win32":
    import resource

from spmd.errors import MeshError, SpmdError
from spmd.job import checks, failure_detector, launcher
from spmd.job.collective_scope import name_ranks
from spmd.job.host_memory import keep_freed_memory

CONNECTIONS, OWN = 4, 512
"""Descriptors of the process that keeps the store: for each rank, and for all else that it opens.

A rank has two connections to the store, a third to the first rank of a mesh that saves, and one where all ranks send to
all.
"""


def is_distributed() -> bool:
    """Whether this process belongs to a distributed job: it started torch.distributed, or a launcher started it.

    Launchers are torchrun and, for more than one process, `srun` of SLURM and the `mpirun` of Open MPI, MPICH or Intel
    MPI (`docs/processes.md`).
    """
    return dist.is_initialized() or launcher.started() is not None


def init(*, timeout: timedelta | float | None = None, check: Literal["first", "calls"] | None = None) -> None:
    """Start torch.distributed from a launcher's variables: gloo for CPU tensors and, where there are GPUs, NCCL.

    `make_mesh(runtime="distributed")` does this; call it first to choose a timeout. What is started already is left
    alone, and without a launcher, where `make_mesh` makes virtual meshes, nothing is started. Where ranks compute on
    processors, glibc keeps the memory that they free (`spmd.job.host_memory`).

    Args:
        timeout: how long a collective may wait for the other ranks, and a rank for the others to start, in seconds or
            as a timedelta; by default torch's.
        check: what ranks compare of the calls of jitted functions: `"first"` the first call of each program, `"calls"`
            every call: the function, its static arguments, the shapes, dtypes and specs of its arguments, digests of
            those that must be equal, and the state of the random generator, if it draws (`docs/debugging.md`). By
            default what the environment variable SPMD_CHECK says, or `"first"`. It can be chosen again at any time; all
            ranks must choose the same.

    Raises:
        MeshError: a timeout that is not positive, or that comes too late; no such check.
        SpmdError: other ranks did not start in time; the message names them.
    """
    checks.choose(check)
    limit = _parse_timeout(timeout)
    if is_distributed():
        start(limit)


def start(limit: timedelta | None = None) -> None:
    """Start torch.distributed, if it is not.

    Args:
        limit: the timeout.

    Raises:
        MeshError: a launcher's variables are missing, or a timeout comes too late.
        SpmdError: other ranks did not start in time.
    """
    if dist.is_initialized():
        if limit is not None:
            raise MeshError(
                "init(timeout=...) came after torch.distributed was started. Call it before the first make_mesh, or "
                "give the timeout to torch.distributed.init_process_group."
            )
        _settle()
        return
    process = launcher.started()
    if process is None:
        missing = ", ".join(name for name in launcher.VARIABLES if not os.environ.get(name))
        raise MeshError(
            f"A distributed mesh needs the variables that torchrun sets (missing: {missing}), or those of several "
            "tasks of srun or mpirun. Start the script by `torchrun --nproc-per-node 8 script.py`, or take "
            "runtime='virtual' in one process."
        )
    rank, size, patience, (host, port) = process.rank, process.size, limit or default_pg_timeout, process.address
    atexit.register(_leave)
    # Gloo connects ranks at their first exchange, and not each with each other: torch reads it at the first group.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    try:
        store = _store(process, patience)
        late = _roll_call(store, rank, size, patience)
        if not late:
            dist.init_process_group(_backends(), store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise SpmdError(
            f"Rank {rank} of {size} could not start torch.distributed at {host}:{port}. Is rank 0 there? ({reason})"
        ) from error
    if late:
        raise SpmdError(
            f"Only {size - len(late)} of {size} processes started within {patience}: "
            f"{name_ranks(late)} did not. Start all of them with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE "
            f"(rank 0 waited at {host}:{port}), or wait longer: spmd.init(timeout=...)."
        )
    _settle()


def _settle() -> None:
    """What a process of a job needs beside torch.distributed."""
    keep_freed_memory()
    failure_detector.start()


def _backends() -> str:
    """Gloo for CPU tensors, whatever the mesh: ranks compare values on the host; and that of the accelerator, if any.

    By default, torch takes one backend only, that of the accelerator (`BackendConfig` in torch 2.13).

    The device is not given here, as `device_id`: torch would connect all ranks at once and split each later NCCL group
    from this one, by `ncclCommSplit`, which all ranks of the job must call. But groups of mesh axes are made by their
    members only, where a missing one is named (`spmd.collectives.transport.process_groups`).
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    name = found and dist.Backend.default_device_backend_map.get(found.type)
    return f"cpu:gloo,{found.type}:{name}" if found and name and dist.is_backend_available(name) else "gloo"


def _store(process: launcher.Process, limit: timedelta) -> dist.Store:
    """The store of torch.distributed: torchrun's, or else one that rank 0 keeps."""
    rank, size = process.rank, process.size
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: dist.Store = next(iter(dist.rendezvous("env://", timeout=limit)))[0]
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        return dist.PrefixStore(f"attempt{attempt}", store) if _is_restarted() else store
    if rank == 0:
        _reserve_descriptors(CONNECTIONS * size + OWN)
    # as torch makes it, but it does not wait for all ranks: who is missing shows in the roll call
    host, port = process.address
    made = dist.TCPStore(host, port, size, rank == 0, limit, wait_for_workers=False, multi_tenant=True)
    # ports of two SLURM jobs may be equal: ranks that reach the other's store must not meet there
    return made if process.slurm_step is None else dist.PrefixStore("slurm{}.{}".format(*process.slurm_step), made)


def _reserve_descriptors(count: int) -> None:
    """Let this process open so many files, as far as its user may.

    Raises:
        SpmdError: the user may not. Without descriptors the store would let processes wait for ever.
    """
    if sys.platform == "win32":
        return
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= count:
        return
    if highest != resource.RLIM_INFINITY and highest < count:
        raise SpmdError(
            f"Rank 0 keeps the store of torch.distributed and needs about {count} open files (the limit is {highest}). "
            "Raise the limit where rank 0 runs (`ulimit -Hn`), or start the job by torchrun, whose agent keeps the "
            "store."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, highest))


def _roll_call(store: dist.Store, rank: int, size: int, limit: timedelta) -> list[int]:
    """The ranks that do not start in time, as rank 0 finds."""
    store.set(f"started{rank}", "")
    if rank > 0:
        store.wait(["late"], 2 * limit)  # rank 0 may have started later
        return [int(late) for late in store.get("late").decode().split()]
    late = _absent(store, [f"started{other}" for other in range(size)], limit)
    store.set("late", " ".join(map(str, late)))
    if late:
        time.sleep(1.0)  # for the others to read it: the store may end with this process
    return late


def _absent(store: dist.Store, names: list[str], limit: timedelta) -> list[int]:
    """The positions of the names that are not in a store when the time is over."""
    try:
        store.wait(names, limit)
    except dist.DistStoreError:
        return [position for position, name in enumerate(names) if not store.check([name])]
    return []


def _leave() -> None:
    """End what `init` started while the interpreter is whole: a tensor that gloo's threads let go later would abort it.

    https://github.com/pytorch/pytorch/issues/190489. Not after an error, when collectives may be under way that nobody
    will answer.
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
    if not isinstance(timeout, (timedelta, int, float)):
        raise MeshError(f"timeout must be a number of seconds or a timedelta (got {timeout!r}).")
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise MeshError(f"timeout must be positive (got {timeout!r}).")
    return limit


def process_count() -> int:
    """The number of processes of the job; 1 outside of one. JAX's `jax.process_count`."""
    if dist.is_initialized():
        return dist.get_world_size()
    process = launcher.started()
    return 1 if process is None else process.size


def process_index() -> int:
    """The rank of this process; 0 outside of a distributed job. JAX's `jax.process_index`."""
    if dist.is_initialized():
        return dist.get_rank()
    process = launcher.started()
    return 0 if process is None else process.rank


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group's first backend; None if it has none."""
    return getattr(group._get_backend(group._device_types[0]).options, "_timeout", None)


def choose_device(device: torch.device) -> torch.device:
    """The device of a mesh whose ranks are processes: of several GPUs, each process takes the one of its local rank.

    The local rank is what the launcher says. A job of one process takes the current GPU, and a process that sees only
    one GPU takes that, if its launcher says nothing of local ranks (a container for each process) or shows each process
    one of its own (`srun --gpus-per-task 1`). That two processes do not share it cannot be seen here; NCCL refuses it
    when it connects them. A device with an index is taken as it is.

    The result has no index, so that it is the same on all ranks; the process's current device says which one it is.

    Raises:
        MeshError: fewer GPUs than processes on this machine, or no local rank in a job of several processes.
    """
    if device.type != "cuda":
        return device
    index = _gpu() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise MeshError(
            f"Rank {process_index()} wants GPU {index}, but there are {torch.cuda.device_count()} here. Start at most "
            "one process a GPU, or pass device='cpu'; device='cuda:0' if each process sees one GPU, a different one."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda")


def _gpu() -> int:
    """The index of the GPU for this process."""
    rank, size, count = process_index(), process_count(), torch.cuda.device_count()
    local_rank = launcher.local_rank(rank, size)
    if local_rank is not None:
        return 0 if count == 1 and launcher.has_own_gpu() else local_rank
    if count < 2:
        return 0
    if size == 1:
        return torch.cuda.current_device()
    raise MeshError(
        f"Rank {rank} of {size} sees {count} GPUs and does not know which one is its own. Set "
        "LOCAL_RANK to its number among the processes of its machine, as torchrun does (srun and mpirun set variables "
        "of their own), or pass device='cuda:<number>'."
    )
