"""The processes that save or load together, and errors that reach all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import attrs
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from spmd.collectives.distributed.agreement import check_agreement, gather
from spmd.collectives.transport.process_groups import group_for
from spmd.core.mesh import Mesh, Runtime
from spmd.errors import CheckpointError, DamagedError, MeshError, SpmdError
from spmd.job.collective_scope import CollectiveScope, failed
from spmd.job.process import process_count, process_index

T = TypeVar("T")


@attrs.frozen
class Processes:
    """Some processes of a job, or this one alone.

    Args:
        call: the user's call, for messages.
        group: a separate gloo group, so that collectives of a background save do not mix with those of training; None
            for this process alone.
        ranks: the numbers of the processes in the job, ascending, as torch numbers them in the group.
    """

    call: str
    group: dist.ProcessGroup | None
    ranks: tuple[int, ...] = (0,)

    @property
    def index(self) -> int:
        """The number of this process among them."""
        return 0 if self.group is None else self.ranks.index(process_index())

    @property
    def count(self) -> int:
        """The number of processes."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes plain leaves and the metadata: the first, or the only one."""
        return self.index == 0

    def gather(self, value: T) -> list[T]:
        """The values of all these processes in rank order, on each of them.

        Raises:
            DivergenceError: a process makes another call.
            SpmdError: a process never makes the call.
        """
        return [value] if self.group is None else gather(self.call, value, self.ranks)

    def together(self, step: Callable[[], T]) -> T:
        """Run a local step and return its result; if it fails in any process, all processes raise an error.

        Raises:
            CheckpointError: the step failed in another process; the message has its rank and its error.
            DamagedError: the step failed, and in no process by any other error.
        """
        error, result = None, None
        try:
            result = step()
        except Exception as caught:
            error = caught
        errors = self.gather(None if error is None else (_is_damage(error), _text(error)))
        kind = DamagedError if all(is_damage for is_damage, _ in filter(None, errors)) else CheckpointError
        if error is not None and _is_damage(error) == (kind is DamagedError):
            raise error
        for rank, failure in zip(self.ranks, errors, strict=True):
            if failure is not None:
                raise kind(f"Rank {rank} of {len(errors)} failed: {failure[1]}")
        return result  # type: ignore[return-value]

    def first(self, value: T) -> T:
        """The value of the first process, on all processes."""
        return self.gather(value)[0]

    def agree(self, claims: Callable[[], Mapping[str, str]]) -> None:
        """Check that all processes make the same claims, as `check_agreement` does; nothing for one process.

        Raises:
            DivergenceError: they differ; the message has the first difference.
        """
        if self.group is not None:
            expected = "Every rank must make the same call, with the same path and the same tree."
            check_agreement(self.call, claims(), expected, self.ranks)

    @contextmanager
    def errors_of(self, what: str) -> Iterator[None]:
        """A context that turns errors of collectives and of DCP into a CheckpointError that names the failed ranks.

        DCP raises its errors in all processes.

        Raises:
            CheckpointError: for a RuntimeError, or DCP's `CheckpointException`, which derives from `BaseException`; a
                DamagedError if all failures are such.
        """
        try:
            yield
        except CheckpointException as failure:
            failures = sorted(failure.failures.items())
            for _, (error, _) in failures:
                if not isinstance(error, Exception):  # as a KeyboardInterrupt
                    raise error from None
            prefix = "" if self.group is None else "rank {}: "
            reasons = "; ".join(f"{prefix.format(self.ranks[rank])}{_text(error)}" for rank, (error, _) in failures)
            kind = DamagedError if all(_is_damage(error) for _, (error, _) in failures) else CheckpointError
            raise kind(f"{what} failed: {reasons}") from failures[0][1][0]
        except RuntimeError as error:  # from a collective
            scope = CollectiveScope(what, self.ranks)
            raise CheckpointError(str(failed(scope, error))) from error


def _is_damage(error: BaseException) -> bool:
    return isinstance(error, DamagedError)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, SpmdError) else f"{type(error).__name__}: {error}"


def processes_of(call: str, meshes: Iterable[Mesh]) -> Processes:
    """The processes that save or load a tree.

    This one alone for virtual meshes or without a job, else those of the meshes, or all of the job if there is no mesh.

    Args:
        call: the user's call, for messages.
        meshes: the meshes of the tree's DTensors.

    Raises:
        MeshError: virtual and distributed meshes in one tree, or meshes over different processes, or not over this one.
        DivergenceError: ranks make different calls.
        SpmdError: a rank never makes the call.
    """
    given = list(meshes)
    runtimes = {mesh.runtime for mesh in given}
    if len(runtimes) > 1:
        names = " and ".join(sorted(runtime.value for runtime in runtimes))
        raise MeshError(f"The leaves of a checkpoint must be on meshes of one runtime (got {names}). Save them apart.")
    alone = Runtime.VIRTUAL in runtimes or not dist.is_available() or not dist.is_initialized()
    if alone:
        return Processes(call, None)
    ranks = _ranks_of(given)
    gather(call, None, ranks)  # check that all make this call before a group is made
    return Processes(call, group_for("checkpoints", ranks), ranks)


def _ranks_of(meshes: Sequence[Mesh]) -> tuple[int, ...]:
    """The processes of distributed meshes, ascending; all of the job if there is none."""
    every = {tuple(sorted(mesh.ranks)): mesh for mesh in meshes}
    for mesh in every.values():
        mesh.require_processes()
    if len(every) > 1:
        names = " and ".join(map(str, every.values()))
        raise MeshError(
            f"The leaves of a checkpoint must be on meshes over the same processes (got {names}). Save them apart."
        )
    return next(iter(every), tuple(range(process_count())))
