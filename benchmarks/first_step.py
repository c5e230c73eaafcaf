"""The first step of a deep GPT, compilation included, by `spmd` on one rank, torch and JAX.

    python benchmarks/first_step.py [--layers 4 16] [--jax PYTHON] [--markdown proofs/reports/performance.md]

A step is forward, backward and SGD, of the same weights and batch in all rows. Each row runs in a process of its own
with empty caches, one after the other; its times are the least of all repetitions. Imports when a process starts do not
count; what a system imports in its first call does. Steps run with one thread. Inductor compiles in its own process,
so that its C++ compilers count as processor time; XLA compiles with its own threads. `--jax` names a Python that has
JAX, by default this one. A row that fails says why. The exit status is 1 if losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from peer_first_step import ROWS
from peers import environment
from proofs.page import table, write_section

COLUMNS = ("row", "first step, s", "CPU, s", "second step, ms", "CPU, ms")

JAX_ROWS: Mapping[str, Sequence[str]] = {"JAX jit, unrolled": (), "JAX jit, lax.scan": ("--scan",)}

TOLERANCE = 1e-5
"""Of losses, relative."""


@attrs.frozen
class Steps:
    """Wall and processor seconds of the first step, then of the second, and the losses; or why there are none."""

    seconds: Sequence[float] = ()
    losses: Sequence[float] = ()
    version: str = ""
    failure: str = ""

    @property
    def has_loss(self) -> bool:
        """Test for steps that were run: what is only compiled has no losses."""
        return not self.failure and self.losses[0] == self.losses[0]

    def cells(self) -> Sequence[str]:
        """The cells of the table after the name."""
        if self.failure:
            return (f"not measured: {self.failure}", "", "", "")
        first, second = self.seconds[:2], self.seconds[2:] if self.has_loss else ()
        return [f"{each:.2f}" for each in first] + [f"{1e3 * each:.0f}" for each in second] + [""] * (2 - len(second))


def main() -> int:
    """Measure, print the tables, and write what is asked for; 1 if losses differ."""
    options = arguments()
    load = os.getloadavg()[0]
    found = {layers: measure(options, layers) for layers in options.layers}
    versions = {row.version for rows in found.values() for row in rows.values() if "jax" in row.version}
    sizes = f"Width {options.width}, batch {options.batch}, least of {options.repetitions}"
    about = ", ".join((sizes, environment(load), *versions))
    lines = [f"{about}.", ""]
    for layers, rows in found.items():
        lines += [f"{layers} layers:", "", *table(COLUMNS, [(name, *row.cells()) for name, row in rows.items()]), ""]
    print("\n".join(lines))
    if options.markdown:
        command = f"    python benchmarks/first_step.py {shlex.join(sys.argv[1:]).replace(options.jax, 'PYTHON')}"
        write_section(options.markdown, "first step", "\n".join(["Written by", "", command, "", *lines]))
    differences = [text for rows in found.values() for text in disagreements(rows)]
    print("\n".join(differences))
    return int(bool(differences))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rows", nargs="+", choices=(*ROWS, *JAX_ROWS), default=(*ROWS, *JAX_ROWS), metavar="ROW")
    parser.add_argument("--repetitions", type=int, default=2, help="processes of each row")
    parser.add_argument("--limit", type=int, default=600, help="seconds of a process")
    parser.add_argument("--jax", metavar="PYTHON", default=sys.executable, help="a Python that has JAX")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to a section of it")
    return parser.parse_args()


def measure(options: argparse.Namespace, layers: int) -> dict[str, Steps]:
    """All rows of a depth."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "arguments.pickle"
        sizes = [f"--layers={layers}", f"--width={options.width}", f"--batch={options.batch}"]
        torchs = [sys.executable, str(Path(__file__).with_name("peer_first_step.py")), *sizes]
        subprocess.run([*torchs, "--save", str(saved)], check=True)
        jaxs = [options.jax, str(Path(__file__).with_name("jax_first_step.py")), str(saved)]
        found = {}
        for name in options.rows:
            command = [*jaxs, *JAX_ROWS[name]] if name in JAX_ROWS else [*torchs, name]
            runs = [run(command, options.limit) for _ in range(options.repetitions)]
            found[name] = next((each for each in runs if each.failure), runs[0])
            if not found[name].failure:
                seconds = [min(each) for each in zip(*(each.seconds for each in runs), strict=True)]
                found[name] = attrs.evolve(found[name], seconds=seconds)
            print(f"measured: {layers} layers, {name}", file=sys.stderr, flush=True)
    return found


def run(command: Sequence[str], limit: int) -> Steps:
    """Two steps in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "SPMD_CACHE_DIR")}
        environ = os.environ | caches | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        try:
            ran = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=limit)
        except subprocess.TimeoutExpired:
            return Steps(failure=f"more than {limit} s")
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or ["no output"]
        return Steps(failure=next((line for line in reversed(lines) if "Error" in line), lines[-1]))
    return Steps(**json.loads(ran.stdout.splitlines()[-1]))


def disagreements(rows: Mapping[str, Steps]) -> Sequence[str]:
    """A line for each row whose losses are not those of the first row that has losses."""
    with_losses = {name: row.losses for name, row in rows.items() if row.has_loss}
    expected = next(iter(with_losses.values()), ())
    return [
        f"The losses of {name} are {losses}, those of the first row {expected}."
        for name, losses in with_losses.items()
        if any(abs(loss - other) > TOLERANCE * abs(other) for loss, other in zip(losses, expected, strict=True))
    ]


if __name__ == "__main__":
    raise SystemExit(main())
