"""The bytes that a training step sends: `spmd`, counted on the programs that ranks run, the textbook and other systems.

python benchmarks/comms.py
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import attrs
import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model and its layouts are the example's

import gpt
import layouts
import spmd
from spmd.collectives.traffic import record_traffic
from textbook import BATCH, PEERS, WORKLOAD, textbook
from training import Training

MB = 1e6


@attrs.frozen
class Measurement:
    """The communication of one step.

    Args:
        counts: collectives of each kind in the program of a rank.
        bytes: bytes of each kind that the rank sending the most sends, computed for ring algorithms.
        moved: bytes that the rank sending the most sent, recorded collective by collective while the step ran.
        loss: the loss of the step.
    """

    counts: dict[str, int]
    bytes: dict[str, float]
    moved: float
    loss: float

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return sum(self.bytes.values())


def workload_batch(config: gpt.Config = WORKLOAD, batch: int = BATCH) -> gpt.Batch:
    """Random tokens and targets."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab, (batch, config.context + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def measure(name: str) -> Measurement:
    """Lower one step of a strategy on its own mesh, and run it."""
    strategy = layouts.STRATEGIES[name]
    training = Training(WORKLOAD, strategy, spmd.make_mesh(strategy.mesh, runtime="virtual"))
    state, batch, step = training.init(), workload_batch(), training.step()
    counts: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for collective in step.lower(state, batch).collectives:
        counts[collective.kind] += 1
        sent[collective.kind] += collective.bytes
    with record_traffic() as traffic:
        _, loss = step(state, batch)
    moved = sum(max(transfer.sent) for transfer in traffic.transfers)
    return Measurement(dict(counts), dict(sent), moved, loss.item())


def main() -> int:
    """Print the table; the exit status is 1 if the runtime moved a different number of bytes than the program says."""
    console = Console(width=max(140, Console().width))
    table = Table(title="MB sent per rank and step, ring model (over the textbook)", title_justify="left")
    columns = ("strategy", "textbook", "JAX, CPU", "JAX, GPU rewrites", "DTensor", "DTensor, hinted", "spmd", "moved")
    for column in columns:
        table.add_column(column, justify="left" if column == "strategy" else "right")
    kinds = Table(title="spmd by kind: count and MB", title_justify="left")
    for column in ("strategy", "kind", "count", "MB"):
        kinds.add_column(column, justify="right" if column in ("count", "MB") else "left")
    consistent = True
    for name, peers in PEERS.items():
        measured, reference = measure(name), textbook(name)
        cells = [ratio(megabytes, reference) for megabytes in attrs.astuple(peers)]
        moved = f"{measured.moved / MB:.2f}"
        table.add_row(name, f"{reference / MB:.2f}", *cells, ratio(measured.total / MB, reference), moved)
        for kind, count in sorted(measured.counts.items()):
            kinds.add_row(name, kind, str(count), f"{measured.bytes[kind] / MB:.3f}")
        kinds.add_section()
        consistent &= abs(measured.moved - measured.total) <= 1e-6 * measured.total
    console.print(table)
    console.print(kinds)
    console.print("bytes moved by the runtime " + ("agree" if consistent else "DISAGREE with the programs"))
    return int(not consistent)


def ratio(megabytes: float | None, reference: float) -> str:
    """Megabytes, and their ratio to the textbook's bytes."""
    return "fails" if megabytes is None else f"{megabytes:.2f} ({megabytes * MB / reference:.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
