"""The overhead of the distributed runtime on one rank: a training step against its own local program called directly.

On one rank nothing is sent, so all time beyond the local torch code is overhead: finding the signature, taking shards
out of DTensors and wrapping results. The step written for one device is timed for comparison. The three take turns in
one process, on gloo. Times are processor time with one torch thread.

    python benchmarks/rank_overhead.py
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model and its layouts are the example's

import gpt
import layouts
import spmd
from comms import workload_batch
from spmd.runtime.codegen import generate
from spmd.runtime.communication import communicating
from step_time import Timed
from textbook import WORKLOAD
from training import Training, init, make_step

STEPS = 25

BAR = 1.10
"""The largest allowed ratio of the time of a step to that of its local program."""


@attrs.frozen
class RankTime:
    """Median seconds of a step, of its local program called directly, and of the step for one device."""

    step: float
    program: float
    single: float

    @property
    def ratio(self) -> float:
        """The time of the step over that of its local program."""
        return self.step / self.program


def measure(name: str, config: gpt.Config = WORKLOAD, steps: int = STEPS) -> RankTime:
    """Time a strategy's step on the one rank of this process's job."""
    strategy, batch = layouts.STRATEGIES[name], workload_batch(config)
    mesh = spmd.make_mesh(strategy.mesh_of(1), runtime="distributed")
    training = Training(config, strategy, mesh)
    state, step = training.init(), training.step()
    lowered = step.lower(state, batch)
    program = generate(communicating(lowered.graph(), mesh, mesh.coordinate(0), lowered.schedule)).function

    def local(leaves: list[torch.Tensor], batch: gpt.Batch) -> tuple[Any, torch.Tensor]:
        *leaves, loss = program([*leaves, *batch])
        return leaves, loss

    rivals = (
        Timed(step, state),
        Timed(local, [leaf.to_local() for leaf in spmd.core.pytree.tree_leaves(state)]),
        Timed(make_step(config, training.optimizer), init(config, training.optimizer)),
    )
    for _ in range(steps + 1):
        for rival in rivals:
            rival(batch)
    return RankTime(*(statistics.median(rival.seconds[1:]) for rival in rivals))


def measure_all() -> dict[str, RankTime]:
    """All strategies, one after the other."""
    torch.set_num_threads(1)
    return {name: measure(name) for name in layouts.STRATEGIES}


def main() -> int:
    """Print the table; the exit status is 1 if the ratio of a step is above the limit."""
    found = spmd.launch(measure_all, 1)
    table = Table(title=f"One step on one rank: processor time, medians of {STEPS}", title_justify="left")
    for column in ("strategy", "step, ms", "local program, ms", f"ratio (at most {BAR})", "one device, ms"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for name, row in found.items():
        times = [f"{seconds * 1e3:.1f}" for seconds in attrs.astuple(row)]
        table.add_row(name, *times[:2], f"{row.ratio:.3f}", times[2])
    Console().print(table)
    return int(any(row.ratio > BAR for row in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
