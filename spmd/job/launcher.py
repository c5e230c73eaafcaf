"""What launchers tell a process of its job, in environment variables: torchrun, MPI and SLURM.

Torchrun's variables win: torchrun may itself be a task of SLURM's. MPI's win over SLURM's, because `mpirun` on several
hosts starts one SLURM task a host, whose variables its processes inherit.

A job of MPI or SLURM has more than one task, so that a script in an interactive shell, in a batch script or under
`srun -n 1` is none. Of SLURM only the variables of a step count, those of `srun`: a batch script and the shell of
`salloc` have the number of tasks of the whole allocation, but are not these tasks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs

from spmd.errors import MeshError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, and other launchers in its manner, set for each process."""


@attrs.frozen
class _Names:
    """The variables of a launcher: for the rank, the number of processes, and both on this machine."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_TORCHRUN = _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = _Names("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_OTHERS = (
    _Names(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),  # Open MPI
    # MPICH, Intel MPI; not `srun --mpi=pmi2`, without the last two
    _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _SLURM,
)

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

_STEPS = 0xFFFFFFF0
"""SLURM's step ids from here on are not of `srun`: batch scripts, interactive shells (slurm.h)."""

_PORTS = 61440
"""The first of 4096 ports above those that Linux gives to clients, as JAX chooses them for a SLURM job."""


@attrs.frozen
class Process:
    """This process among those of a job that a launcher has started.

    Args:
        rank, size: of this process, and of the job.
        slurm_step: the job and the step, if this process is a task of `srun`.
        environment: the environment variables.
    """

    rank: int
    size: int
    slurm_step: tuple[int, int] | None = None
    _environment: Mapping[str, str] = attrs.field(default=MappingProxyType({}), repr=False, kw_only=True)

    @property
    def address(self) -> tuple[str, int]:
        """The host and port at which rank 0 keeps the store of torch.distributed.

        They are MASTER_ADDR and MASTER_PORT. A SLURM step without them has its first host, on which SLURM's default
        distributions place task 0, and a port by its job and step.

        Raises:
            MeshError: they are not known.
        """
        host, port = self._environment.get("MASTER_ADDR"), _number(self._environment, "MASTER_PORT")
        if self.slurm_step is not None:
            host = host or _first_host(self._environment.get("SLURM_STEP_NODELIST", ""))
            job, step = self.slurm_step
            port = port or _PORTS + (job + 17 * step) % 4096
        if not host or not port:
            raise MeshError(
                "The launcher does not say where rank 0 is. Export MASTER_ADDR, a name of its host that all processes "
                "can reach, and MASTER_PORT, a port that is free there, to all processes."
            )
        return host, port


def started(environment: Mapping[str, str] = os.environ) -> Process | None:
    """This process as a launcher describes it; None if none has started it as one of several.

    Raises:
        MeshError: a variable that should be a number is none.

    >>> started({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    Process(rank=3, size=8, slurm_step=None)
    >>> started({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"})  # in a batch script
    """
    if all(map(environment.get, VARIABLES)):
        place = _place(environment, _TORCHRUN)
        return None if place is None else Process(*place, environment=environment)
    if environment.get("RANK") or environment.get("WORLD_SIZE"):
        return None  # something is missing, which `init` says
    for names in _OTHERS:
        place = _place(environment, names)
        if place is not None and environment.get(names.local_rank):
            step = _slurm_step(environment) if names is _SLURM else None
            return None if place[1] == 1 else Process(*place, step, environment=environment)
    return None


def local_rank(rank: int, size: int, environment: Mapping[str, str] = os.environ) -> int | None:
    """The rank of this process among those of its machine; None if no launcher says.

    SLURM's or MPI's counts only if its rank and number of processes are those of the job: under `mpirun` SLURM numbers
    the hosts, and not the processes.

    Args:
        rank, size: of this process, and of the job, whoever has started it.
        environment: the environment variables.
    """
    return _on_machine(lambda names: names.local_rank, (rank, size), environment)


def local_size(rank: int, size: int, environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of processes on this machine; None if no launcher says. Arguments are those of `local_rank`.

    Of SLURM, which lists the tasks of each host, it is the first host's.

    >>> local_size(3, 10, {"SLURM_PROCID": "3", "SLURM_NTASKS": "10", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
    ...     "SLURM_STEP_TASKS_PER_NODE": "4(x2),2"})
    4
    """
    tasks = re.match(r"\d*", environment.get(_SLURM.local_size, ""))
    first = {_SLURM.local_size: tasks[0] if tasks else ""}
    return _on_machine(lambda names: names.local_size, (rank, size), {**environment, **first})


def has_own_gpu(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher shows each process a GPU of its own: an MPI or SLURM task that sees a single one.

    Not torchrun, whose processes have one environment: all of them see the same GPU.
    """
    shown = next(filter(None, map(environment.get, _VISIBLE)), "")
    return bool(shown) and "," not in shown and not environment.get(_TORCHRUN.local_rank)


def _on_machine(
    variable: Callable[[_Names], str], place: tuple[int, int], environment: Mapping[str, str]
) -> int | None:
    """A number that a launcher says of the processes on this machine; only that of the launcher of this job."""
    if (found := _number(environment, variable(_TORCHRUN))) is not None:
        return found
    for names in _OTHERS:
        if place == _place(environment, names) and (found := _number(environment, variable(names))) is not None:
            return found
    return None


def _place(environment: Mapping[str, str], names: _Names) -> tuple[int, int] | None:
    """The rank and the number of processes that a launcher's variables say; None if they do not."""
    if names is _SLURM and _slurm_step(environment) is None:
        return None
    rank, size = _number(environment, names.rank), _number(environment, names.size)
    return None if rank is None or size is None else (rank, size)


def _slurm_step(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """The job and the step of `srun`; None outside of one."""
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    return None if job is None or step is None or step >= _STEPS else (job, step)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise MeshError(f"The environment variable {name} must be a number (got {text!r}).") from None


def _first_host(nodes: str) -> str:
    """The first host of a list in SLURM's notation.

    >>> _first_host("gpu[003-010,015],cpu1")
    'gpu003'
    """
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
