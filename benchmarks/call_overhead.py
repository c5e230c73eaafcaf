"""What calling a jitted function costs beyond running its programs.

The function returns its arguments, so its local programs are empty and the whole call is overhead: checking each leaf
against its spec, and wrapping each result. The same function under shard_map, called outside of jit, is timed in turns.

    python benchmarks/call_overhead.py
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from rich.console import Console
from rich.table import Table

import spmd
from spmd import P
from spmd.runtime.virtual import VirtualProgram
from turns import Case, microseconds

LEAVES = (1, 2, 5, 10, 20, 50, 100, 200)
REPEAT = 7
FIXED_US, LEAF_US = 100.0, 2.0
"""The budget in microseconds: what a call may add, and what each leaf may add to that."""
MAPPED = 1.5
"""The most times that a call of the function under shard_map may take of one under jit."""


@attrs.frozen
class Overhead:
    """Microseconds of one call with `leaves` leaves, of one under shard_map, and of running its programs alone."""

    leaves: int
    call: float
    mapped: float
    programs: float

    @property
    def added(self) -> float:
        """Microseconds that the call adds to its programs."""
        return self.call - self.programs

    @property
    def budget(self) -> float:
        """Microseconds that the call may add to its programs."""
        return FIXED_US + LEAF_US * self.leaves


def calls(leaves: int) -> dict[str, Callable[[], object]]:
    """The identity of a list of `leaves` vectors on eight virtual ranks, called in the three ways that are timed."""
    mesh = spmd.make_mesh({"data": 8}, runtime="virtual")
    arguments = [spmd.distribute(torch.zeros(8), P("data"), mesh) for _ in range(leaves)]
    identity = spmd.jit(lambda values: values, (P("data"),), P("data"), mesh=mesh)
    identity(arguments)
    shards = [argument.shards for argument in arguments]
    run = VirtualProgram(identity.lower(arguments))
    mapped = spmd.shard_map(lambda values: values, mesh, (P("data"),), P("data"))
    mapped(arguments)
    return {
        "jit": lambda: identity(arguments),
        "shard_map": lambda: mapped(arguments),
        "programs": lambda: run(list(shards)),
    }


CASES: dict[str, Case] = {
    f"{kind}, {leaves} leaves": lambda kind=kind, leaves=leaves: calls(leaves)[kind]
    for leaves in LEAVES
    for kind in ("jit", "shard_map")
}


def measure(leaves: int) -> Overhead:
    """Time the calls with `leaves` leaves."""
    timed = calls(leaves)
    turns = [[microseconds(timed[kind], REPEAT) for kind in ("jit", "shard_map")] for _ in range(3)]
    return Overhead(leaves, *map(min, zip(*turns, strict=True)), microseconds(timed["programs"], REPEAT))


def main() -> int:
    """Print the table; the exit status is 1 if a call adds more than its budget, or shard_map takes too long."""
    table = Table(title="Microseconds a call of an empty program on eight virtual ranks", title_justify="left")
    for column in ("leaves", "call", "shard_map", "times", "programs", "ratio", "added", "added a leaf", "budget"):
        table.add_column(column, justify="right")
    rows = [measure(leaves) for leaves in LEAVES]
    for row in rows:
        table.add_row(
            str(row.leaves),
            f"{row.call:.1f}",
            f"{row.mapped:.1f}",
            f"{row.mapped / row.call:.2f}",
            f"{row.programs:.1f}",
            f"{row.call / row.programs:.1f}",
            f"{row.added:.1f}",
            f"{row.added / row.leaves:.2f}",
            f"{row.budget:.0f}",
        )
    Console().print(table)
    return int(any(row.added > row.budget or row.mapped > MAPPED * row.call for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
