"""What `spmd.init(check="calls")` adds to a call of a jitted function, on gloo processes.

The function returns its arguments, so nothing is sent but the comparison; calls with and without it take turns. More
ranks than cores wait for each other: the processor time of a rank then says more than the time of the clock.

    python benchmarks/call_checks.py --ranks 2 8 32
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.table import Table

import spmd
from spmd import P

ROUNDS, CALLS = 5, 20
MIB = 1 << 20


@attrs.frozen
class Cost:
    """Microseconds of a call by the clock and of one rank's processor, of rank 0; medians over rounds."""

    clock: float
    processor: float

    def __str__(self) -> str:
        return f"{self.clock:,.0f} ({self.processor:,.0f})"


def measure() -> dict[str, dict[str, Cost]]:
    """By case and check, the cost of a call; a case that makes DTensors has no function to compare."""
    torch.set_num_threads(1)
    mesh = spmd.make_mesh({"data": spmd.process_count()})
    found = {}
    for name, call in _cases(mesh).items():
        found[name] = {check: [] for check in ("first", "calls")}
        for _ in range(ROUNDS):
            for check, costs in found[name].items():
                spmd.init(check=check)
                call()
                costs.append(_time(call))
        spmd.init(check="first")
    return {
        name: {check: Cost(*map(statistics.median, zip(*costs, strict=True))) for check, costs in by_check.items()}
        for name, by_check in found.items()
    }


def _cases(mesh: spmd.Mesh) -> dict[str, Callable[[], object]]:
    rows = 8 * mesh.size

    def identity(spec: P, *leaves: torch.Tensor) -> Callable[[], object]:
        function = spmd.jit(lambda values: values, (spec,), spec, mesh=mesh, machine=spmd.Machine())
        return lambda: function(leaves)

    def placed(spec: P, *shape: int, count: int = 1) -> list[Any]:
        return [spmd.distribute(torch.ones(shape), spec, mesh) for _ in range(count)]

    batch = torch.ones(64, 1024)
    return {
        "1 sharded DTensor": identity(P("data"), *placed(P("data"), rows)),
        "200 sharded DTensors": identity(P("data"), *placed(P("data"), rows, count=200)),
        "200 replicated DTensors of 4 KiB": identity(P(), *placed(P(), 1024, count=200)),
        "1 replicated DTensor of 16 MiB": identity(P(), *placed(P(), 4 * MIB)),
        "1 plain tensor of 1 MiB": identity(P(), torch.ones(MIB // 4)),
        'from_process_data(256 KiB, P("data"))': lambda: spmd.from_process_data(batch, P("data"), mesh),
        "from_process_data(256 KiB, P())": lambda: spmd.from_process_data(batch, P(), mesh),
    }


def _time(call: Callable[[], object]) -> tuple[float, float]:
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - clock) / CALLS * 1e6, (time.process_time() - processor) / CALLS * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    ranks = parser.parse_args().ranks
    found = {count: spmd.launch(measure, count) for count in ranks}
    title = "Microseconds a call by the clock, and of a rank's processor: without the comparison, with it"
    table = Table(title=title, title_justify="left")
    table.add_column("arguments")
    for count in ranks:
        table.add_column(f"{count} ranks, first", justify="right")
        table.add_column(f"{count} ranks, calls", justify="right")
    for name in found[ranks[0]]:
        table.add_row(name, *(str(found[count][name][check]) for count in ranks for check in ("first", "calls")))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
