"""A training step by `spmd` and by torch's parallel systems, in the processes of one job, in turns."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model and its layouts are the example's

import gpt
import layouts
import spmd
from comms import workload_batch
from peer_model import Gpt, adam, spread
from spmd import Machine
from spmd.lowering.program import LocalProgram
from spmd.plan.schedule.timing import Timing as Predicted
from training import Training

STRATEGIES = ("dp", "fsdp", "tp", "dp_tp", "fsdp_tp")

PEERS: Mapping[str, str] = MappingProxyType(
    {
        "dp": "DDP",
        "fsdp": "FSDP2",
        "tp": "parallelize_module",
        "dp_tp": "DDP + parallelize_module",
        "fsdp_tp": "FSDP2 + parallelize_module",
    }
)
"""Torch's system for each strategy."""

LOSSES = 3
"""Steps whose losses are compared. They come first, so that they warm up what is timed after them."""

TOLERANCE = 1e-5
"""The largest relative difference at which two losses count as equal."""

PATIENCE = 180.0
"""Seconds that a collective waits for the other ranks: a system that fails on some ranks only is given up then."""

Step = Callable[[], float]
"""Runs one training step and returns the loss, of this rank's part of the batch at least."""


@attrs.frozen
class Case:
    """One comparison.

    Args:
        strategy: one of `STRATEGIES`.
        config: the model.
        batch: sequences in a step, of all ranks together.
        adams: kinds of torch's Adam, `"foreach"` and `"fused"`: one peer for each.
        machine: what `spmd` plans for; None for what its ranks measure.
    """

    strategy: str
    config: gpt.Config
    batch: int
    adams: tuple[str, ...] = ("foreach",)
    machine: Machine | None = attrs.field(factory=Machine)


@attrs.frozen
class Timing:
    """One system's step.

    Args:
        cpu: median over the rounds of the processor seconds of all ranks together, with all threads of theirs.
        wall: median over the rounds of the seconds of the slowest rank.
        losses: of the first steps.
        error: why the system cannot run the step; its times are NaN then.
    """

    cpu: float
    wall: float
    losses: tuple[float, ...]
    error: str = ""

    @classmethod
    def failed(cls, error: str) -> Timing:
        """The timing of a system that fails."""
        return cls(float("nan"), float("nan"), (), error)


@attrs.frozen
class Comparison:
    """One table row for each peer.

    Args:
        what: the strategy, or what else is compared.
        width, batch: of the model, and sequences in a step; a batch of 0 is none.
        ranks: the number of processes.
        spmd: ours.
        peers: torch's, by name.
        collectives: how many `spmd` launches a step, by kind.
        sent: bytes that a rank sends a step in them, by ring algorithms.
    """

    what: str
    width: int
    batch: int
    ranks: int
    spmd: Timing
    peers: dict[str, Timing]
    collectives: dict[str, int] = attrs.field(factory=dict)
    sent: float = 0.0

    def disagreement(self, tolerance: float = TOLERANCE) -> str:
        """A message if the losses of a peer differ by more than a relative tolerance; empty if all agree."""
        for name, peer in self.peers.items():
            pairs = zip(self.spmd.losses, peer.losses, strict=not peer.error)
            if not all(abs(ours - theirs) <= tolerance * abs(theirs) for ours, theirs in pairs):
                case = f"{self.what}, width {self.width}, batch {self.batch}"
                return f"{case}: losses differ, {self.spmd.losses} by spmd, {peer.losses} by {name}"
        return ""


@attrs.frozen
class Prepared:
    """A case that is ready to run.

    Args:
        case: the case.
        ours: the step of `spmd`.
        peers: torch's steps, by name.
        failures: the peers that cannot be made.
    """

    case: Case
    ours: SpmdStep
    peers: dict[str, Step]
    failures: dict[str, Timing]

    @property
    def steps(self) -> dict[str, Step]:
        """All steps, ours first."""
        return {"spmd": self.ours, **self.peers}

    def comparison(self, timings: Mapping[str, Timing]) -> Comparison:
        """The comparison, from the timings of all steps."""
        program, peers = self.ours.program, {name: timing for name, timing in timings.items() if name != "spmd"}
        return Comparison(
            self.case.strategy,
            self.case.config.width,
            self.case.batch,
            program.mesh.size,
            timings["spmd"],
            peers | self.failures,
            program.count(),
            sum(comm.bytes for comm in program.collectives),
        )


def measure(case: Case, rounds: int) -> Comparison:
    """Run a case on the ranks of this job; a collective call."""
    prepared = prepare(case)
    return prepared.comparison(in_turns(prepared.steps, rounds))


def prepare(case: Case) -> Prepared:
    """The steps of a case on the ranks of this job; a collective call."""
    start()
    strategy = layouts.STRATEGIES[case.strategy]
    mesh = spmd.make_mesh(strategy.mesh_of(spmd.process_count()), runtime="distributed")
    batch = workload_batch(case.config, case.batch)
    ours = SpmdStep.of(Training(case.config, strategy, mesh), batch, case.machine)
    peers: dict[str, Step] = {}
    failures: dict[str, Timing] = {}
    for kind in case.adams:
        name = f"{PEERS[case.strategy]}, {kind}"
        try:
            peers[name] = torchs(case, mesh, batch, kind)
        except Exception as error:  # what torch cannot run is a row of the table
            failures[name] = Timing.failed(first_line(error))
    return Prepared(case, ours, peers, failures)


def start() -> None:
    """Begin the job of this process, unless it has begun."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        spmd.init(timeout=PATIENCE)


class SpmdStep:
    """A jitted step, called on its own previous state, which it is given to free.

    Args:
        step: the jitted function of a state and a batch.
        state: the first state.
        batch: the batch of all steps, on the mesh.
    """

    def __init__(self, step: Any, state: Any, batch: Any) -> None:
        self._step, self._state, self._batch = step, state, batch
        compiled = step.compile(state, batch)
        self.program: LocalProgram = compiled.program
        self.timing: Predicted = compiled.plan.timing

    @classmethod
    def of(cls, training: Training, batch: gpt.Batch, machine: Machine | None = None) -> SpmdStep:
        """The step of a training setup."""
        placed = spmd.distribute(batch, layouts.batch_spec(training.mesh), training.mesh)
        return cls(training.step(donate_argnums=0, machine=machine), training.init(), placed)

    def __call__(self) -> float:
        self._state, loss = self._step(self._state, self._batch)
        return loss.item()


def torchs(case: Case, mesh: spmd.Mesh, batch: gpt.Batch, kind: str) -> Step:
    """Torch's step of a case, on a `DeviceMesh` like `mesh`."""
    strategy = layouts.STRATEGIES[case.strategy]
    torch_mesh = init_device_mesh("cpu", tuple(mesh.axes.values()), mesh_dim_names=tuple(mesh.axes))
    model = spread(Gpt(case.config, gpt.init(case.config)), strategy, torch_mesh)
    optimizer = adam(model, kind)
    if "data" in mesh.axes:
        size, rank = mesh.axes["data"], torch_mesh.get_local_rank("data")
        tokens, targets = (part.chunk(size)[rank] for part in batch)
    else:
        tokens, targets = batch

    def step() -> float:
        with loss_parallel() if strategy.tensor_parallel else contextlib.nullcontext():
            loss = model(tokens, targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.to_local() if isinstance(loss, DTensor) else loss).item()

    return step


def in_turns(steps: Mapping[str, Step], rounds: int) -> dict[str, Timing]:
    """Time steps, one of each in every round, all ranks starting together."""
    losses, failures = first_steps(steps)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in losses}
    for _ in range(rounds):
        for name, rows in times.items():
            rows.append(timed(steps[name]))
    return {name: timing(from_ranks(rows), losses[name]) for name, rows in times.items()} | failures


def first_steps(steps: Mapping[str, Step]) -> tuple[dict[str, list[tuple[float, ...]]], dict[str, Timing]]:
    """The losses of each rank's first steps, by system, and the systems that fail; all ranks find the same ones."""
    losses: dict[str, list[tuple[float, ...]]] = {}
    failures: dict[str, Timing] = {}
    for name, step in steps.items():
        error, own = "", ()
        try:
            own = tuple(step() for _ in range(LOSSES))
        except Exception as caught:
            if name == "spmd":
                raise
            error = first_line(caught)
        if found := next(filter(None, from_ranks(error)), ""):
            failures[name] = Timing.failed(found)
        else:
            losses[name] = from_ranks(own)
    return losses, failures


def timed(step: Step) -> tuple[float, float]:
    """Processor seconds and seconds of this rank's step, all ranks starting together."""
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - cpu, time.perf_counter() - wall


def timing(times: Sequence[Sequence[tuple[float, float]]], losses: Sequence[Sequence[float]]) -> Timing:
    """The timing of a system from the processor seconds and seconds of each rank and round, and each rank's losses."""
    rounds = list(zip(*times, strict=True))
    return Timing(
        statistics.median(sum(cpu for cpu, _ in ranks) for ranks in rounds),
        statistics.median(max(wall for _, wall in ranks) for ranks in rounds),
        tuple(map(statistics.fmean, zip(*losses, strict=True))),
    )


def from_ranks(value: object) -> list:
    """The values of all ranks; a collective call."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def first_line(error: Exception) -> str:
    """An error as a cell of a table."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
