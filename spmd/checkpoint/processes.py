"""The processes that save or load together, and errors that reach all of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from spmd.errors import CheckpointError, DivergenceError, MeshError, SpmdError
from spmd.mesh import Mesh, Runtime

T = TypeVar("T")


@attrs.frozen
class Processes:
    """All processes of a job, or this one alone.

    Args:
        group: a gloo group of its own, because a save in the background must not meet the collectives of training; None
            for this process alone.
    """

    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        """The number of this process among them."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes what is written once."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every process, in their order, on every process."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, step: Callable[[], T]) -> T:
        """What a step of this process returns. If it fails in any process, it fails in all.

        Raises:
            CheckpointError: the step failed in another process; the message has its rank and what it said.
        """
        error, result = None, None
        try:
            result = step()
        except Exception as caught:
            error = caught
        errors = self.gather(None if error is None else _text(error))
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text is not None:
                raise CheckpointError(f"Rank {rank} of {len(errors)} failed: {text}")
        return result  # type: ignore[return-value]

    def agree(self, lines: Sequence[str], what: str) -> None:
        """Check that all processes say the same; `what` they say it about stands in the message.

        Raises:
            DivergenceError: one of them does not; the message has the first line that differs.
        """
        digests = self.gather(hashlib.sha256("\n".join(lines).encode()).digest())
        rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if rank is None:
            return
        everything = self.gather(tuple(lines))
        first, other = everything[0], everything[rank]
        here, there = next(
            ((mine, theirs) for mine, theirs in zip(first, other, strict=False) if mine != theirs),
            (f"{len(first)} leaves", f"{len(other)} leaves"),
        )
        raise DivergenceError(
            f"Ranks 0 and {rank} differ in {what}: rank 0 has {here}, rank {rank} has {there}. Every rank must make "
            "the same call, with the same path and the same tree."
        )

    @contextmanager
    def errors_of(self, what: str) -> Iterator[None]:
        """Turn DCP's error, which it raises in all processes, into a CheckpointError that says which of them failed.

        Raises:
            CheckpointError: what DCP calls a CheckpointException, which is no Exception.
        """
        try:
            yield
        except CheckpointException as failure:
            failures = sorted(failure.failures.items())
            for _, (error, _) in failures:
                if not isinstance(error, Exception):  # an interrupt from the keyboard
                    raise error from None
            where = "" if self.group is None else ", on rank "
            reasons = "; ".join(
                f"{where}{rank}: {_text(error)}" if where else _text(error) for rank, (error, _) in failures
            )
            raise CheckpointError(f"{what} failed{'' if where else ': '}{reasons}") from failures[0][1][0]


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, SpmdError) else f"{type(error).__name__}: {error}"


def processes_of(meshes: Iterable[Mesh]) -> Processes:
    """The processes that hold a tree whose DTensors lie on these meshes: one of a virtual mesh, else all of the job.

    Raises:
        MeshError: virtual and distributed meshes in one tree.
    """
    runtimes = {mesh.runtime for mesh in meshes}
    if len(runtimes) > 1:
        names = " and ".join(sorted(runtime.value for runtime in runtimes))
        raise MeshError(f"The leaves of a checkpoint must lie on meshes of one runtime (got {names}). Save them apart.")
    alone = Runtime.VIRTUAL in runtimes or not dist.is_available() or not dist.is_initialized()
    return Processes(None if alone else _group(dist.group.WORLD))


@functools.lru_cache(maxsize=1)  # of the present job; another one, started in the same process, gets another group
def _group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")
