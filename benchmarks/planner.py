"""Measures what the planner promises: a table for each promise, and an exit status of 1 if one is not kept.

python benchmarks/planner.py [--quick] [--only PROMISE ...]

Times are process time of one thread. Only the generated programs allocate tensors.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the models and their layouts are the examples'
sys.path.append(str(Path(__file__).parents[1]))  # `proofs` is not installed

import layouts
import llama
import spmd
from proofs.joint import joint_optimum
from proofs.oracle import Search, searches_of
from schedules import SCHEDULES
from spmd import Machine
from spmd.inspect import Plan
from spmd.testing.programs import Case, cases
from textbook import BATCH, PEERS, WORKLOAD, textbook
from workloads import GptStep

SAME = 1e-6
"""The largest relative difference at which two costs count as equal."""

PLAN_12 = 2.0
PIPELINE_32 = 15.0
PLAN_OPERATOR = 0.5e-3
RANKS_RATIO = 1.1
LLAMA_SECONDS, LLAMA_BYTES = 90.0, 8e9
NEAR_JOINT = 1.05


@attrs.frozen
class Finding:
    """What was measured of one promise: a table, and whether all of its rows keep it."""

    table: Table
    kept: bool


class Rows:
    """A table under construction; the last cell of a row says whether the promise holds."""

    def __init__(self, title: str, *columns: str) -> None:
        self.table = Table(title=title, title_justify="left")
        self.kept = True
        for number, column in enumerate((*columns, "kept")):
            self.table.add_column(column, justify="right" if 0 < number <= len(columns) - 1 else "left")

    def add(self, *cells: object, kept: bool) -> None:
        """Add a row."""
        self.table.add_row(*map(str, cells), "yes" if kept else "NO")
        self.kept &= kept

    @property
    def finding(self) -> Finding:
        """The table so far, and whether all of its rows keep the promise."""
        return Finding(self.table, self.kept)


def workload(strategy: str, layers: int = WORKLOAD.layers, mesh: dict[str, int] | None = None) -> GptStep:
    """The small GPT of the benchmarks with another number of layers."""
    return GptStep(attrs.evolve(WORKLOAD, layers=layers), strategy, BATCH, mesh)


def optimum(quick: bool) -> Finding:
    """The searches of the strategies and of generated programs, by mesh axis and order, against an integer program."""
    rows = Rows("Predicted seconds over HiGHS's optimum", "problems", "searches", "variables", "worst, less 1")

    def add(name: str, searches: list[Search]) -> None:
        pairs = [(search.solution.cost, search.optimum()) for search in searches]
        variables = max(len(search.domains) for search in searches)
        worst = max(abs(cost - best) / (best or 1.0) for cost, best in pairs)
        rows.add(name, len(searches), f"up to {variables}", f"{worst:.1e}", kept=worst <= SAME)

    count = 20 if quick else 200
    add(f"{count} generated programs", list(generated(count)))
    for layers in (1,) if quick else (1, 4):
        for strategy in layouts.STRATEGIES:
            add(f"GPT, {layers} layers, {strategy}", searches_of(workload(strategy, layers).plan().request))
    return rows.finding


def joint(quick: bool) -> Finding:
    """Two mesh axes planned one after the other, against the optimum of both at once."""
    columns = ("strategy", "width", "planned, us", "optimum, us", "planned over optimum", "optimum, searched in s")
    rows = Rows(
        "Predicted time of a GPT step, 1 layer, 1,024 tokens, over that of all mesh axes planned at once", *columns
    )
    for strategy in ("dp_tp", "fsdp_tp"):
        for width in (1024,) if quick else (1024, 2048):
            plan = GptStep(attrs.evolve(WORKLOAD, width=width, layers=1), strategy, BATCH).plan()
            start = time.process_time()
            best = joint_optimum(plan.request)
            searched = f"{time.process_time() - start:.0f}"
            ratio = plan.seconds / best.seconds
            planned, least = (f"{1e6 * seconds:.2f}" for seconds in (plan.seconds, best.seconds))
            rows.add(strategy, width, planned, least, f"{ratio:.4f}", searched, kept=ratio <= NEAR_JOINT)
    return rows.finding


def generated(count: int) -> Iterator[Search]:
    """The searches of random programs on random meshes."""
    found: list[Search] = []

    @seed(0)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=HealthCheck
    )
    @given(cases())
    def record(case: Case) -> None:
        searches = searches_of(case.jitted().plan(*case.arguments).request)
        assume(searches)
        found.extend(searches)

    record()
    return iter(found)


def bytes_sent(quick: bool) -> Finding:
    """Bytes sent by the six strategies, beside those of the textbook and of JAX."""
    rows = Rows("MB sent per rank and step", "strategy", "textbook", "JAX, GPU rewrites", "spmd", "caused", "search, s")
    for strategy in layouts.STRATEGIES:
        start = time.process_time()
        plan = workload(strategy).plan()
        seconds = time.process_time() - start
        sent = sum(comm.bytes for comm in plan.comms) / 1e6
        reference, jax = textbook(strategy) / 1e6, PEERS[strategy].jax_gpu
        kept = sent <= reference and round(sent, 2) <= jax and uncaused(plan) == 0
        rows.add(strategy, f"{reference:.3f}", jax, f"{sent:.3f}", caused(plan), f"{seconds:.1f}", kept=kept)
    return rows.finding


def caused(plan: Plan) -> str:
    """How many of a plan's collectives have a cause and a user's line."""
    return f"{len(plan.comms) - uncaused(plan)} of {len(plan.comms)}"


def uncaused(plan: Plan) -> int:
    """How many of a plan's collectives lack a cause or a line in a file that is not the package's own."""
    own = str(Path(spmd.__file__).parent)
    return sum(
        not comm.cause or comm.source is None or (comm.source.file.startswith(own) and "optim" not in comm.source.file)
        for comm in plan.comms
    )


def literal(quick: bool) -> Finding:
    """Textbook schedules, collective by collective."""
    columns = ("schedule", "layers", "collectives", "as the closed form", "caused", "GB sent", "predicted, ms")
    rows = Rows("Textbook schedules, width 4096, 8 ranks", *columns)
    for layers in (1, 2) if quick else (1, 2, 32):
        for name, schedule in SCHEDULES.items():
            options = {"keep_sharded": {"0.params": "model"}} if name == "tp, pinned" else {}
            plan = schedule.step(layers).plan(**options)
            found, wanted = schedule.found(plan), schedule.sent(layers)
            sent = f"{sum(comm.bytes for comm in plan.comms) / 1e9:.3f}"
            same = f"{(found & wanted).total()} of {wanted.total()}"
            kept = found == wanted and uncaused(plan) == 0
            milliseconds = f"{1e3 * plan.seconds:.3f}"
            rows.add(name, layers, len(plan.comms), same, caused(plan), sent, milliseconds, kept=kept)
    return rows.finding


@attrs.frozen
class Stages:
    """Process seconds of the stages of one step, and the number of operators that are planned."""

    trace: float
    plan: float
    lower: float
    operators: int

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return self.trace + self.plan + self.lower

    @property
    def cells(self) -> tuple[str, ...]:
        """The figures as cells of a table, with the milliseconds of planning per operator."""
        per_operator = f"{1e3 * self.plan / self.operators:.3f}"
        seconds = (self.trace, self.plan, self.lower, self.total)
        return (str(self.operators), *(f"{value:.2f}" for value in seconds), per_operator)


def stages(step: GptStep) -> Stages:
    """Trace, plan and lower a new step, with nothing cached; the time of `plan` includes canonicalization."""
    jitted, arguments = step.jitted(), step.arguments()
    times = [time.process_time()]
    jitted.trace(*arguments)
    times.append(time.process_time())
    operators = len(jitted.plan(*arguments).request.graph.operations)
    times.append(time.process_time())
    _ = jitted.lower(*arguments).collectives
    times.append(time.process_time())
    trace, plan, lower = (after - before for before, after in itertools.pairwise(times))
    return Stages(trace, plan, lower, operators)


def speed(quick: bool) -> Finding:
    """Planning time by the number of layers."""
    columns = ("strategy", "layers", "operators", "trace, s", "plan, s", "lower, s", "all, s", "plan, ms an operator")
    rows = Rows(f"Seconds of planning (load {os.getloadavg()[0]:.0f})", *columns)
    stages(workload("dp", 1))  # imports what tracing needs of torch
    strategies = ("fsdp", "tp") if quick else tuple(layouts.STRATEGIES)
    for strategy in strategies:
        for layers in (4, 8, 12) if quick else (4, 8, 12, 16, 32):
            found = stages(workload(strategy, layers))
            kept = found.plan <= PLAN_OPERATOR * found.operators
            kept &= layers != 12 or found.plan <= PLAN_12
            kept &= layers != 32 or found.total <= PIPELINE_32
            rows.add(strategy, layers, *found.cells, kept=kept)
    return rows.finding


def ranks(quick: bool) -> Finding:
    """Planning time by the number of ranks, measured in turns."""
    rows = Rows("Seconds of planning by ranks, medians of turns", "strategy", "8 ranks", "65,536 ranks", "ratio")
    meshes = {
        "fsdp": ({"data": 8}, {"data": 65_536}),
        "dp_tp": ({"data": 4, "model": 2}, {"data": 8192, "model": 8}),
    }
    for strategy, both in meshes.items():
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(4 if quick else 8):
            for mesh, taken in zip(both, times, strict=True):
                config = attrs.evolve(WORKLOAD, width=4096, heads=32, layers=4)
                found = stages(GptStep(config, strategy, 65_536, mesh))
                if turn:  # the first fills caches
                    taken.append(found.plan)
        few, many = map(median, times)
        rows.add(strategy, f"{few:.2f}", f"{many:.2f}", f"{many / few:.2f}", kept=many <= RANKS_RATIO * few)
    return rows.finding


@attrs.frozen
class LlamaFigures:
    """The time and memory that planning a Llama took, and the figures of its plan."""

    operators: int
    trace: float
    plan: float
    resident: float
    peak: int
    step: float
    collectives: str
    uncaused: int


def plan_llama(layers: int) -> LlamaFigures:
    """Plan a 70B-shaped step on 4,096 ranks; run in a separate process, so that its peak memory is that of planning."""
    torch.set_num_threads(1)
    config = attrs.evolve(llama.LLAMA_70B, layers=layers)
    mesh = spmd.make_mesh({"data": 512, "model": 8}, runtime="abstract")
    training = llama.Training(config, mesh, batch=512)
    step, arguments = training.step(machine=Machine.preset("h100_nvlink")), training.arguments()
    start = time.process_time()
    operators = len(step.trace(*arguments).graph.operations)
    traced = time.process_time()
    plan = step.plan(*arguments)
    planned = time.process_time()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return LlamaFigures(
        operators,
        traced - start,
        planned - traced,
        resident,
        plan.memory.peak,
        plan.seconds,
        caused(plan),
        uncaused(plan),
    )


def llama_70b(quick: bool) -> Finding:
    """Time and memory of planning a Llama of 80 layers on data=512, model=8."""
    columns = ("layers", "operators", "trace, s", "plan, s", "resident, GB", "peak a rank, GB", "step, s", "caused")
    rows = Rows(f"70B-shaped Llama, data=512, model=8, H100 (load {os.getloadavg()[0]:.0f})", *columns)
    layers = 8 if quick else 80
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(plan_llama, layers).result()
    kept = found.trace + found.plan <= LLAMA_SECONDS and found.resident <= LLAMA_BYTES and not found.uncaused
    seconds = (f"{found.trace:.1f}", f"{found.plan:.1f}")
    sizes = (f"{found.resident / 1e9:.2f}", f"{found.peak / 1e9:.2f}", f"{found.step:.3f}")
    rows.add(layers, found.operators, *seconds, *sizes, found.collectives, kept=kept)
    return rows.finding


SEEDS_PROGRAM = """
import hashlib, sys
import torch
from planner import workload
torch.set_num_threads(1)
for strategy in sys.argv[2:]:
    plan = workload(strategy, int(sys.argv[1])).plan()
    text = "\\n".join([str(plan), *map(str, plan.comms)])
    print(strategy, hashlib.sha256(text.encode()).hexdigest()[:16])
"""


def plans_by_seed(seed: int, layers: int, strategies: tuple[str, ...]) -> dict[str, str]:
    """A digest of the plan of each strategy, from a process with `seed` as its `PYTHONHASHSEED`."""
    folder = Path(__file__).parent
    path = os.pathsep.join(map(str, (folder.parent, folder)))
    run = subprocess.run(
        [sys.executable, "-c", SEEDS_PROGRAM, str(layers), *strategies],
        env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split() for line in run.stdout.splitlines())


def seeds(quick: bool) -> Finding:
    """Whether plans are equal under several hash seeds."""
    count, layers = (3, 1) if quick else (10, WORKLOAD.layers)
    rows = Rows(f"Plans under {count} hash seeds", "strategy", "layers", "different plans")
    digests = [plans_by_seed(number, layers, tuple(layouts.STRATEGIES)) for number in range(count)]
    for strategy in layouts.STRATEGIES:
        different = len({found[strategy] for found in digests})
        rows.add(strategy, layers, different, kept=different == 1)
    return rows.finding


PROMISES: dict[str, Callable[[bool], Finding]] = {
    "optimum": optimum,
    "joint": joint,
    "bytes": bytes_sent,
    "literal": literal,
    "speed": speed,
    "ranks": ranks,
    "llama": llama_70b,
    "seeds": seeds,
}


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; the exit status is 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller cases of each promise")
    parser.add_argument("--only", nargs="+", choices=PROMISES, default=list(PROMISES), help="some promises")
    options: Any = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(width=max(130, Console().width))
    broken = []
    for name in options.only:
        finding = PROMISES[name](options.quick)
        console.print(finding.table)
        if not finding.kept:
            broken.append(name)
    console.print("not kept: " + ", ".join(broken) if broken else "all kept")
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
