"""What the distributed runtime costs on one rank: a training step beside its own local program, called directly.

On one rank nothing is sent, so all that a step takes beyond the local torch code that it runs is overhead: finding the
signature, taking shards out of DTensors and wrapping results. The step written for one device is there to compare with.
The three take turns in one process, on gloo; processor time, of one thread of torch.

    python benchmarks/rank_overhead.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model and its layouts are the example's

import gpt
import layouts
import spmd
from comms import workload_batch
from spmd.runtime.codegen import generate
from spmd.runtime.overlap import overlap
from textbook import WORKLOAD
from training import Training, init, make_step

STEPS = 25

BAR = 1.10
"""How much a step may take beside its local program."""


@attrs.frozen
class RankTime:
    """Seconds, medians: of a step, of its local program called directly, and of the step for one device."""

    step: float
    program: float
    single: float

    @property
    def ratio(self) -> float:
        """The step beside its local program."""
        return self.step / self.program


def measure(config: gpt.Config = WORKLOAD, steps: int = STEPS) -> RankTime:
    """Time a step on the one rank of this process's job."""
    mesh, batch = spmd.make_mesh({"data": 1}, runtime="distributed"), workload_batch(config)
    training = Training(config, layouts.STRATEGIES["dp"], mesh)
    state, step = training.init(), training.step()
    lowered = step.lower(state, batch)
    program = generate(overlap(lowered.graph_module(), mesh, (0,)), lockstep=False).function
    leaves = [leaf.to_local() for leaf in spmd.tree.tree_leaves(state)] + list(batch)
    single, single_state = make_step(config, training.optimizer), init(config, training.optimizer)
    times: list[list[float]] = [[], [], []]
    for _ in range(steps + 1):
        calls = (lambda: step(state, batch), lambda: program(list(leaves)), lambda: single(single_state, batch))
        for found, call in zip(times, calls, strict=True):
            found.append(_seconds(call))
    return RankTime(*(statistics.median(found[1:]) for found in times))


def _seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> int:
    """Print the figures; the exit status is 1 if a step takes more than the bar."""
    torch.set_num_threads(1)
    found = spmd.launch(measure, 1)
    Console().print(
        f"one rank: a step {found.step * 1e3:.1f} ms, its local program {found.program * 1e3:.1f} ms "
        f"(ratio {found.ratio:.3f}, at most {BAR}); the step for one device {found.single * 1e3:.1f} ms"
    )
    return int(found.ratio > BAR)


if __name__ == "__main__":
    raise SystemExit(main())
