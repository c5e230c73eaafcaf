"""A training step on eight virtual ranks beside the same step on one device, and beside JAX on eight host devices.

    python benchmarks/virtual_ranks.py [--jax PYTHON] [--json FILE] [--markdown proofs/reports/performance.md]

Virtual ranks share a process: eight of them do the work of one device in turns, so that the ratio is the cost of
sharding. JAX's eight host devices are the same idea; `--jax` names a Python that has it, by default this one. Without
JAX its columns are empty. Times are processor time, medians, with one torch thread; JAX has its own threads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from peers import environment, model
from proofs.page import table, write_section
from step_time import StepTime, measure

STRATEGIES = ("dp", "fsdp", "tp")

COLUMNS = ("strategy", "8 ranks, ms", "one device, ms", "ratio", "JAX, 8 devices, ms", "spmd over JAX", "JAX ratio")


@attrs.frozen
class Jax:
    """What `jax_steps.py` found: processor seconds by strategy; none, and why, if it failed."""

    seconds: Mapping[str, float] = attrs.field(factory=dict)
    version: str = ""
    failure: str = ""


def main() -> int:
    """Measure, print the table, and write what is asked for."""
    options = arguments()
    torch.set_num_threads(1)
    load, config = os.getloadavg()[0], model(options.width)
    found = {name: measure(name, config, options.rounds, options.batch) for name in options.strategies}
    jax = measure_jax(options)
    about = (
        f"width {options.width}, batch {options.batch}, medians of {options.rounds} steps, {environment(load)}, "
        f"{f'jax {jax.version}' if jax.seconds else jax.failure}"
    )
    lines = list(table(COLUMNS, [row(name, time, jax.seconds) for name, time in found.items()]))
    print("\n".join([about, *lines]))
    if options.json:
        steps = {name: attrs.asdict(time) for name, time in found.items()}
        options.json.write_text(json.dumps({"about": about, "spmd": steps, "jax": attrs.asdict(jax)}, indent=1))
    if options.markdown:
        sizes = " ".join(f"--{name} {getattr(options, name)}" for name in ("width", "batch", "rounds"))
        command = f"python benchmarks/virtual_ranks.py {sizes} --jax PYTHON --markdown {options.markdown}"
        text = [f"Written by\n\n    {command}\n", f"{about[0].upper()}{about[1:]}.\n", *lines, ""]
        write_section(options.markdown, "virtual ranks", "\n".join(text))
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each system")
    parser.add_argument("--jax", metavar="PYTHON", default=sys.executable, help="a Python that has JAX")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to a section of it")
    return parser.parse_args()


def measure_jax(options: argparse.Namespace) -> Jax:
    """JAX's steps, in a process of their own."""
    script = Path(__file__).with_name("jax_steps.py")
    sizes = [f"--{name}={getattr(options, name)}" for name in ("width", "batch", "rounds")]
    command = [options.jax, str(script), *sizes, "--strategies", *options.strategies]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no output"])[-1]
        return Jax(failure="jax is not installed" if "No module named 'jax'" in last else f"jax fails: {last}")
    answer: Any = json.loads(ran.stdout.splitlines()[-1])
    return Jax(answer["seconds"], answer["version"])


def row(name: str, time: StepTime, jax: Mapping[str, float]) -> Sequence[str]:
    """The cells of a strategy; ratios of JAX are to its own step on one device."""
    cells = [name, f"{time.mesh * 1e3:.0f}", f"{time.single * 1e3:.0f}", f"{time.ratio:.2f}"]
    if name not in jax:
        return [*cells, "", "", ""]
    theirs = jax[name]
    return [*cells, f"{theirs * 1e3:.0f}", f"{time.mesh / theirs:.2f}", f"{theirs / jax['one device']:.2f}"]


if __name__ == "__main__":
    raise SystemExit(main())
