"""What each rank of a job runs: one case after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
import torch.distributed as dist

import spmd
from proofs.memory_of_ranks.measure import Row, measure, under_limits
from proofs.memory_of_ranks.program import SEED
from proofs.memory_of_ranks.programs import PROGRAMS
from proofs.memory_of_ranks.report import line

PATIENCE = 120.0
"""Seconds that a collective waits for the other ranks."""


@attrs.frozen
class Task:
    """A case to be measured.

    Args:
        program: its name in `PROGRAMS`.
        even: whether all shards are equal.
        limits: the parts of its peak that become limits.
    """

    program: str
    even: bool
    limits: tuple[float, ...] = ()


def rows_of(tasks: Sequence[Task], held: bool = False) -> list[Row]:
    """Measure cases; rank 0 prints each row, and with `held` what is held.

    Args:
        tasks: the cases.
        held: whether to print it.
    """
    if not dist.is_initialized():
        spmd.init(timeout=PATIENCE)
    rows = []
    for task in tasks:
        for row in _rows_of(task):
            rows.append(row)
            if dist.get_rank() == 0:
                print(line(row), *([row.held] if held else []), sep="\n", flush=True)
    return rows


def _rows_of(task: Task) -> Iterator[Row]:
    """The rows of a case; an error is one, and must be one on all ranks."""
    torch.manual_seed(SEED)  # ranks must agree on it
    try:
        case = PROGRAMS[task.program](dist.get_world_size(), task.even)
        if task.limits:
            yield from under_limits(task.program, case, task.even, task.limits)
        else:
            yield measure(task.program, case, task.even)
    except Exception as error:
        note = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield Row(task.program, task.even, dist.get_world_size(), note=note)
