"""The time of a step on a virtual mesh over that of the same step on one device.

Eight virtual ranks do the work of one device in turns, so the ratio is the cost of sharding: work that ranks repeat,
collectives, and more but smaller operators. `first` is the time of tracing, planning and lowering, paid once. Times
are processor time with one torch thread.

    python benchmarks/step_time.py
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
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
from textbook import BATCH, WORKLOAD
from training import Training, init, make_step
from turns import Case

STEPS = 15


@attrs.frozen
class StepTime:
    """Seconds of one strategy.

    Args:
        first: to trace, plan and lower the step.
        mesh: median of a step on the mesh.
        single: median of a step on one device; these steps take turns with those on the mesh.
    """

    first: float
    mesh: float
    single: float

    @property
    def ratio(self) -> float:
        """The time of a step on the mesh over that of a step on one device."""
        return self.mesh / self.single


class Timed:
    """A training step that is called on its own previous state, and the processor seconds of each call."""

    def __init__(self, step: Callable[..., tuple[Any, Any]], state: Any) -> None:
        self._step, self._state = step, state
        self.seconds: list[float] = []

    def __call__(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Run one step and record its time."""
        start = time.process_time()
        self._state, loss = self._step(self._state, batch)
        loss.item()
        self.seconds.append(time.process_time() - start)


def on_mesh(name: str, config: gpt.Config = WORKLOAD, size: int = BATCH) -> tuple[float, Timed, Training]:
    """A strategy's step on its own mesh, after the seconds that its first program takes, and what it is made of."""
    strategy = layouts.STRATEGIES[name]
    training = Training(config, strategy, spmd.make_mesh(strategy.mesh, runtime="virtual"))
    state, step = training.init(), training.step()
    start = time.process_time()
    step.compile(state, workload_batch(config, size))
    return time.process_time() - start, Timed(step, state), training


def _case(name: str) -> Callable[[], object]:
    _, step, _ = on_mesh(name)
    return functools.partial(step, workload_batch())


CASES: dict[str, Case] = {name: functools.partial(_case, name) for name in layouts.STRATEGIES}


def measure(name: str, config: gpt.Config = WORKLOAD, steps: int = STEPS, size: int = BATCH) -> StepTime:
    """Time a strategy on its own mesh, and the same step on one device, in turns; `size` is that of the batch."""
    first, mesh, training = on_mesh(name, config, size)
    single = Timed(make_step(config, training.optimizer), init(config, training.optimizer))
    batch = workload_batch(config, size)
    for _ in range(steps + 1):
        mesh(batch)
        single(batch)
    return StepTime(first, statistics.median(mesh.seconds[1:]), statistics.median(single.seconds[1:]))


def main() -> int:
    """Print the table."""
    torch.set_num_threads(1)
    table = Table(title=f"One training step: processor time, medians of {STEPS}", title_justify="left")
    for column in ("strategy", "mesh", "first, s", "step, ms", "one device, ms", "ratio"):
        table.add_column(column, justify="left" if column in ("strategy", "mesh") else "right")
    for name, strategy in layouts.STRATEGIES.items():
        row = measure(name)
        axes = ", ".join(f"{axis}={count}" for axis, count in strategy.mesh.items())
        times = (f"{row.first:.1f}", f"{row.mesh * 1e3:.0f}", f"{row.single * 1e3:.0f}", f"{row.ratio:.2f}")
        table.add_row(name, axes, *times)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
