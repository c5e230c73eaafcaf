"""The predicted time of a training step beside the measured one, on gloo processes, planned with the measured machine.

    python benchmarks/predictions.py [--widths 128] [--batches 8] [--variants dp sp] [--markdown FILE]

The variants are the six strategies of `examples/layouts.py`, and other plans of theirs. Those of one width and batch
are a group, which measures the machine and then takes turns, in the same processes. In each the predicted times should
have the order of the measured ones (Spearman's correlation), and the median relative error be small. The exit status is
1 if a group misses a bar.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model and its layouts are the example's
sys.path.append(str(Path(__file__).parents[1]))  # `proofs` is not installed

import gpt
import layouts
import spmd
from comms import workload_batch
from peer_steps import from_ranks, start, timed
from peers import environment, measured_anew, model
from proofs.page import table as markdown_table
from proofs.page import write_section
from spmd import Machine
from training import State, Training

BAR_SPEARMAN, BAR_ERROR = 0.8, 0.30
"""The least correlation, and the largest median error, of a group."""

WARM_UP, IN_A_ROW = 1, 3
"""Rounds before those that are timed, and how many steps of a variant are timed in a round, one after the other."""

COLUMNS = ("width", "batch", "variant", "predicted, ms", "measured, ms", "predicted / measured", "collectives", "MB")
GROUPS = ("width", "batch", "variants", "Spearman", "median error")


@attrs.frozen
class Variant:
    """A strategy with a plan of its own.

    Args:
        strategy: one of `layouts.STRATEGIES`.
        options: options of `jit` that force the plan, from the bytes that a rank holds without them.
        mesh: the axes for a number of ranks; by default the strategy's.
    """

    strategy: str
    options: Callable[[int], dict[str, Any]] = lambda peak: {}
    mesh: Callable[[int], dict[str, int]] | None = None


def _axes(strategy: str, data: int) -> Variant:
    return Variant(strategy, mesh=lambda ranks: {"data": data, "model": ranks // data})


def _kept(strategy: str, axis: str) -> Variant:
    return Variant(strategy, lambda peak: {"keep_sharded": {0: axis}})


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        **{name: Variant(name) for name in layouts.STRATEGIES},
        **{f"{name} for an H100": Variant(name, lambda peak: {"machine": Machine()}) for name in layouts.STRATEGIES},
        "fsdp, never gathered": _kept("fsdp", "data"),
        **{f"{name}, never gathered": _kept(name, "model") for name in ("tp", "sp", "dp_tp", "fsdp_tp")},
        "fsdp, 90% memory": Variant("fsdp", lambda peak: {"memory_limit": int(0.9 * peak)}),
        "fsdp, 80% memory": Variant("fsdp", lambda peak: {"memory_limit": int(0.8 * peak)}),
        "sp over data and model": _axes("sp", 2),
    }
)
"""Variants by name; those "for an H100" are the plans of the default machine, at the prices of the measured one."""


@attrs.frozen
class Prediction:
    """A step of one variant.

    Args:
        variant: one of `VARIANTS`.
        width, batch: of the model, and sequences in a step.
        predicted: seconds, for the measured machine.
        measured: median over steps of the seconds of the slowest rank.
        machine: the measured machine, as text.
        collectives: how many a rank runs.
        sent: bytes that a rank sends.
        error: why there is no plan; times are NaN then.
    """

    variant: str
    width: int
    batch: int
    predicted: float
    measured: float
    machine: str
    collectives: int = 0
    sent: float = 0.0
    error: str = ""

    @property
    def relative_error(self) -> float:
        """How far the prediction is from the measurement, relative to that."""
        return abs(self.predicted / self.measured - 1)


def measure(names: Sequence[str], config: gpt.Config, batch: int, rounds: int) -> list[Prediction]:
    """Plan and time a group of variants in turns; a collective call."""
    start()
    steps = {name: _Step(VARIANTS[name], config, batch) for name in names}
    times: dict[str, list[float]] = {name: [] for name, step in steps.items() if not step.error}
    for number in range(WARM_UP + rounds):
        for name in times:
            steps[name].run()  # as in training, where a step finds what the one before has left in memory
            seconds = [timed(steps[name].run)[1] for _ in range(IN_A_ROW)]
            if number >= WARM_UP:
                times[name] += seconds
    every = from_ranks(times)
    found = []
    for name, step in steps.items():
        slowest = [max(row) for row in zip(*(rank[name] for rank in every), strict=True)] if name in times else []
        seconds = statistics.median(slowest) if slowest else float("nan")
        found.append(
            Prediction(name, config.width, batch, step.predicted, seconds, step.machine, *step.sent, error=step.error)
        )
    return found


class _Step:
    """The jitted step of a variant, on its own previous state."""

    predicted, machine, error, sent = float("nan"), "", "", (0, 0.0)

    def __init__(self, variant: Variant, config: gpt.Config, batch: int) -> None:
        strategy = layouts.STRATEGIES[variant.strategy]
        mesh = spmd.make_mesh((variant.mesh or strategy.mesh_of)(spmd.process_count()), runtime="distributed")
        training = Training(config, strategy, mesh)
        self.state: State = training.init()
        self.batch = spmd.distribute(workload_batch(config, batch), layouts.batch_spec(mesh), mesh)
        self.step = training.step(donate_argnums=0)
        self.step.compile(self.state, self.batch)
        plan = self.step.plan(self.state, self.batch)
        self.machine = str(plan.request.machine)
        if options := variant.options(plan.memory.peak):
            forced = training.step(donate_argnums=0, **({"machine": plan.request.machine} | options))
            try:
                own = forced.plan(self.state, self.batch)
            except spmd.PlanError as error:
                self.error = str(error).partition("\n")[0]
                return
            plan = own.transfer(attrs.evolve(own.request, machine=plan.request.machine))
            others = {name: value for name, value in options.items() if name != "machine"}
            self.step = training.step(donate_argnums=0, plan=plan, **others)
        self.predicted, self.sent = plan.timing.step, (len(plan.comms), sum(comm.bytes for comm in plan.comms))

    def run(self) -> float:
        self.state, loss = self.step(self.state, self.batch)
        return loss.item()


def main() -> int:
    """Measure, print the tables, and write what is asked for; 1 if a group misses a bar."""
    options = arguments()
    load, found = os.getloadavg()[0], []
    for width in options.widths:
        for batch in options.batches:
            with measured_anew():
                found += spmd.launch(measure, options.ranks, options.variants, model(width), batch, options.rounds)
            print(f"measured: width {width}, batch {batch}", flush=True)
    steps = f"{options.rounds * IN_A_ROW} steps in {options.rounds} rounds"
    about = f"medians of {steps}, {options.ranks} gloo processes, {environment(load)}"
    console = Console(width=max(160, Console().width))
    console.print(rich_table(COLUMNS, rows(found), f"Predicted and measured steps\n{about}"))
    console.print(rich_table(GROUPS, group_rows(found), "By width and batch"))
    for machine in dict.fromkeys(row.machine for row in found):
        console.print(machine, soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps({"about": about, "found": [attrs.asdict(row) for row in found]}, indent=1))
    if options.markdown:
        write_section(options.markdown, "predictions", markdown(found, about))
    return int(not all(spearman >= BAR_SPEARMAN and error <= BAR_ERROR for *_, spearman, error in groups(found)))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--widths", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=7, help=f"turns of each variant, of {IN_A_ROW} timed steps")
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to a section of it")
    return parser.parse_args()


def rows(found: Sequence[Prediction]) -> Iterator[tuple[str, ...]]:
    """The cells of the table of steps."""
    for row in found:
        if row.error:
            yield str(row.width), str(row.batch), row.variant, row.error, "", "", "", ""
            continue
        times = (f"{seconds * 1e3:.1f}" for seconds in (row.predicted, row.measured))
        ratio = f"{row.predicted / row.measured:.2f}"
        yield str(row.width), str(row.batch), row.variant, *times, ratio, str(row.collectives), f"{row.sent / 1e6:.2f}"


def groups(found: Sequence[Prediction]) -> Iterator[tuple[int, int, int, float, float]]:
    """Width, batch, number of variants, Spearman's correlation and median error of each group."""
    for width, batch in dict.fromkeys((row.width, row.batch) for row in found):
        group = [row for row in found if (row.width, row.batch) == (width, batch) and not row.error]
        found_ranks = spearmanr([row.predicted for row in group], [row.measured for row in group]).statistic
        yield width, batch, len(group), float(found_ranks), statistics.median(row.relative_error for row in group)


def group_rows(found: Sequence[Prediction]) -> Iterator[tuple[str, ...]]:
    """The cells of the table of groups."""
    for width, batch, count, spearman, error in groups(found):
        yield str(width), str(batch), str(count), f"{spearman:.2f}", f"{error:.0%}"


def rich_table(columns: Sequence[str], cells: Iterator[tuple[str, ...]], title: str) -> Table:
    """A table for a terminal."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in cells:
        table.add_row(*row)
    return table


def markdown(found: Sequence[Prediction], about: str) -> str:
    """The section of the page: the command, about the run, the machines, and the tables."""
    command = f"    python benchmarks/predictions.py {shlex.join(sys.argv[1:])}"
    machines = [f"- {machine}" for machine in dict.fromkeys(row.machine for row in found)]
    tables = [*markdown_table(GROUPS, group_rows(found)), "", *markdown_table(COLUMNS, rows(found))]
    return "\n".join(
        ["Written by", "", command, "", f"{about[0].upper()}{about[1:]}. Machines:", "", *machines, "", *tables, ""]
    )


if __name__ == "__main__":
    raise SystemExit(main())
