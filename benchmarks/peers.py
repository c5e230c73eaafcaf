"""A training step by `spmd` beside torch's own parallel systems, in turns in the same processes.

    python benchmarks/peers.py [--strategies dp fsdp] [--widths 128] [--batches 16] [--markdown FILE]
    python benchmarks/peers.py --link 1Gbit --strategies dp fsdp
    python benchmarks/peers.py --device cuda --sizes 512x16 2048x64 --compile

Every strategy runs on gloo processes of this machine: `spmd` by specs for arguments and results, torch by DDP, FSDP2
and `parallelize_module`, on the same weights and batches, and the losses of the first steps must agree. Then come a
step on one rank, which sends nothing, and the optimizer alone. Times are processor time of all ranks with their
threads, and the time of the slowest rank. The exit status is 1 if losses differ; a slow case is no failure.

With `--device cuda`, only one rank and the optimizer are measured, on a GPU: NCCL refuses two ranks on one.

With `--link`, ranks have links of a rate between them (`link.py`), and the table is another (`peer_link.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import attrs
import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model and its layouts are the example's
sys.path.append(str(Path(__file__).parents[1]))  # `proofs` is not installed

import gpt
import link
import peer_link
import spmd
from peer_link import LinkComparison, measure_on_links
from peer_local import measure_local, measure_optimizer
from peer_steps import STRATEGIES, Case, Comparison, Timing, measure
from proofs.page import table as markdown_table
from proofs.page import write_section
from spmd import Machine
from spmd.plan.machine.machine import PRESETS

ROOT = Path(__file__).parents[1]
MB = 1e6

BUSY = 0.5
"""The load average from which on a machine is not idle."""

GLOO = Machine(flops=9e10, memory_bandwidth=1e10, link_bandwidth=2.4e9, latency=1.4e-3)
"""Roughly one of four gloo processes on two cores of an AMD EPYC, in seconds of its processor time.

From the processor time of all ranks over four, on a machine with other work: the products of a step at width 512, list
operators on its parameters (rounded down), and all_reduces of 52 MB and of 512 B. One of 1 MB takes as long as one of
512 B, which a sum of latency and bytes cannot say.
"""

MACHINES: Mapping[str, Machine | None] = MappingProxyType(
    {"default": Machine(), "gloo": GLOO, "measured": None, **PRESETS}
)
"""What `spmd` plans for, by name; None is what its ranks measure."""

Found = Sequence[Comparison] | Sequence[LinkComparison]
"""What a run finds, of one kind."""

COLUMNS = (
    "what",
    "width",
    "batch",
    "peer",
    "spmd CPU, ms",
    "peer CPU, ms",
    "ratio",
    "spmd wall, ms",
    "peer wall, ms",
    "ratio",
    "spmd collectives",
    "spmd MB",
    "",
)


def main() -> int:
    """Measure, print the table, and write what is asked for; 1 if losses differ."""
    options = arguments()
    if options.link:
        link.enter()
    load, found = os.getloadavg()[0], []
    for comparison in measurements_on_links(options) if options.link else measurements(options):
        found.append(comparison)
        print(f"measured: case {len(found)}, {datetime.datetime.now():%H:%M:%S}", flush=True)
    where = environment(load, options.device)
    about = f"plans for the machine {options.machine!r}, medians of {options.rounds} rounds, {where}"
    device = "" if options.device == "cpu" else f", {options.device}"
    name = f"peers, {options.machine}{', torch.compile' if options.compile else ''}{device}"
    if options.link:
        ranks = f"{options.ranks} ranks"
        about = f"{ranks} with links of {options.link} a second, {about}"
        name = f"{ranks} with links of {options.link}, {options.machine}"
    console = Console(width=max(190, Console().width))
    console.print(rich_table(found, about))
    if options.json:
        options.json.write_text(json.dumps({"about": about, "found": [attrs.asdict(row) for row in found]}, indent=1))
    if options.markdown:
        write_section(options.markdown, name, markdown(found, about))
    differences = [text for comparison in found if (text := comparison.disagreement())]
    for text in differences:
        console.print(text, soft_wrap=True)
    return int(bool(differences))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("ranks", "one-rank", "optimizer")
    parser.add_argument("--parts", nargs="+", choices=parts, help="what to measure; all that the device can by default")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one rank and the optimizer only"
    )
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--widths", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--sizes", nargs="+", type=size, metavar="WIDTHxBATCH", help="in place of widths and batches")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each system")
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--adam", nargs="+", choices=("foreach", "fused"), default=["foreach"], help="of the peers")
    parser.add_argument("--machine", choices=tuple(MACHINES), default="measured", help="what spmd plans for")
    parser.add_argument("--link", metavar="RATE", help="links of a rate, such as 1Gbit, between the ranks; only those")
    parser.add_argument("--compile", action="store_true", help="one rank: torch.compile, too; half a minute a case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to the machine's section of it")
    options = parser.parse_args()
    options.parts = options.parts or (parts if options.device == "cpu" else parts[1:])
    if options.device != "cpu" and "ranks" in options.parts:
        parser.error("--device cuda: the ranks of --parts ranks would share one GPU, which NCCL refuses.")
    if options.device != "cpu" and options.link:
        parser.error("--device cuda: links of a rate are between processes, and one GPU has one.")
    options.sizes = options.sizes or [(width, batch) for width in options.widths for batch in options.batches]
    return options


def size(text: str) -> tuple[int, int]:
    """A width and a batch, as `128x16`."""
    width, batch = text.split("x")
    return int(width), int(batch)


def measurements(options: argparse.Namespace) -> Iterator[Comparison]:
    """Measure each case in processes of its own."""
    with measured_anew():
        for case in cases(options) if "ranks" in options.parts else ():
            yield spmd.launch(measure, options.ranks, case, options.rounds)
    for width, batch in options.sizes if "one-rank" in options.parts else ():
        yield from spmd.launch(measure_local, 1, model(width), batch, options.rounds, options.compile, options.device)
    for width in sorted({width for width, _ in options.sizes}) if "optimizer" in options.parts else ():
        yield from spmd.launch(measure_optimizer, 1, model(width), options.rounds, options.device)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The cases of several ranks."""
    machine = MACHINES[options.machine]
    for width, batch in options.sizes:
        for strategy in options.strategies:
            yield Case(strategy, model(width), batch, tuple(options.adam), machine)


def measurements_on_links(options: argparse.Namespace) -> Iterator[LinkComparison]:
    """The same on links of a rate, which plans know."""
    link_bandwidth = link.bits_per_second(options.link) / 8
    with measured_anew():
        for case in cases(options):
            if case.machine is not None:
                machine = attrs.evolve(case.machine, link_bandwidth=min(link_bandwidth, case.machine.link_bandwidth))
                case = attrs.evolve(case, machine=machine)
            yield link.launch(measure_on_links, options.ranks, case, options.rounds, options.link)


@contextlib.contextmanager
def measured_anew() -> Iterator[None]:
    """Here ranks measure their machines again, and keep them for what else runs here."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPMD_CACHE_DIR"] = folder
        yield


def model(width: int) -> gpt.Config:
    """The benchmark's model of a width."""
    return gpt.Config(vocab=256, width=width)


def rows(found: Sequence[Comparison]) -> Iterator[tuple[str, ...]]:
    """The cells of the table; the last says what `spmd` loses, or why a peer fails."""
    for comparison in found:
        collectives = ", ".join(f"{count} {kind}" for kind, count in sorted(comparison.collectives.items()))
        sent = f"{comparison.sent / MB:.2f}" if collectives else ""
        for name, peer in comparison.peers.items():
            yield (
                comparison.what,
                str(comparison.width),
                str(comparison.batch or ""),
                name,
                *cells(comparison.spmd, peer),
                collectives,
                sent,
                verdict(comparison.spmd, peer),
            )


def cells(ours: Timing, peer: Timing) -> Iterator[str]:
    """Milliseconds of both and their ratio, of processor time and of time."""
    for mine, theirs in ((ours.cpu, peer.cpu), (ours.wall, peer.wall)):
        yield f"{mine * 1e3:.1f}"
        yield from ("fails", "") if peer.error else (f"{theirs * 1e3:.1f}", f"{mine / theirs:.2f}")


def verdict(ours: Timing, peer: Timing) -> str:
    """What `spmd` loses, or the error of the peer."""
    if peer.error:
        return peer.error
    lost = [
        name for name, mine, theirs in (("CPU", ours.cpu, peer.cpu), ("wall", ours.wall, peer.wall)) if mine > theirs
    ]
    return f"loses {' and '.join(lost)}" if lost else ""


def rich_table(found: Found, about: str) -> Table:
    """The table for a terminal."""
    columns, lines = (peer_link.COLUMNS, peer_link.rows) if on_links(found) else (COLUMNS, rows)
    table = Table(title=f"One training step by spmd and by its peers\n{about}", title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("what", "peer", "spmd collectives", "") else "right")
    for row in lines(found):
        table.add_row(*row, style="red" if row[-1] else None)
    return table


def on_links(found: Found) -> bool:
    """Whether a run had links of a rate."""
    return any(isinstance(comparison, LinkComparison) for comparison in found)


def markdown(found: Found, about: str) -> str:
    """The section of the page: the command, about the run, and the table."""
    command = f"    python benchmarks/peers.py {shlex.join(sys.argv[1:])}"
    return "\n".join(
        [
            "Written by",
            "",
            command,
            "",
            f"{about[0].upper()}{about[1:]}.",
            "",
            *(peer_link.page if on_links(found) else page)(found),
            "",
        ]
    )


def page(found: Sequence[Comparison]) -> Iterator[str]:
    """The lines of the table; a ratio at which `spmd` loses is bold."""
    shown = [
        [f"**{cell}**" if number in (6, 9) and cell and float(cell) > 1 else cell for number, cell in enumerate(row)]
        for row in rows(found)
    ]
    yield from markdown_table(COLUMNS, shown)


def environment(load: float, device: str = "cpu") -> str:
    """The machine, the date and the versions, and how busy the machine was before the run began."""
    commit = subprocess.run(("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, capture_output=True, text=True)
    date = datetime.date.today().isoformat()
    idle = "" if load < BUSY else f", not idle (load average {load:.1f} before the run)"
    gpu = "" if device == "cpu" else f"{torch.cuda.get_device_name()}, "
    return (
        f"{gpu}{processor()}, {os.cpu_count()} cores{idle}, {date}, commit {commit.stdout.strip() or 'unknown'}, "
        f"torch {torch.__version__}"
    )


def processor() -> str:
    """The name of the processor, as Linux gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )


if __name__ == "__main__":
    raise SystemExit(main())
