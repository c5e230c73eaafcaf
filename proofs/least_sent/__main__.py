"""`python -m proofs.least_sent --op PATTERN`: what plans send beside what must be sent, the worst operators first."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from rich.progress import track

from proofs.least_sent import report_of_functions
from proofs.least_sent.report import markdown
from proofs.least_sent.sweep import Entry, Setting, sweep_entry
from proofs.op_sweep.cases import entries, full_name
from proofs.page import write_section
from proofs.pool import Lost, each


def main() -> int:
    """Run the sweep and print, or write, the operators that send more than twice what they must."""
    options = _options()
    torch.set_num_threads(1)
    if options.functions:
        return _write(options.markdown, "functions", report_of_functions.markdown())
    setting = Setting(options.mesh or (options.ranks,), not options.uneven, options.backward, options.samples)
    chosen = entries(options.op)
    work = partial(sweep_entry, setting=setting)
    found = [
        Entry(full_name(entry), failure="no answer in time") if isinstance(result, Lost) else result
        for entry, result in track(each(chosen, work, jobs=options.jobs, seconds=options.seconds), total=len(chosen))
    ]
    return _write(options.markdown, setting.name, markdown(sorted(found, key=lambda entry: entry.name)))


def _write(file: Path | None, section: str, text: str) -> int:
    """Print a section of the report, and write it."""
    print(text)
    if file:
        write_section(file, section, f"## {section[0].upper()}{section[1:]}\n\n{text}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proofs.least_sent", description=__doc__)
    parser.add_argument("--op", default="", help="part of an entry's name; 'name$' for exactly one")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a mesh of one axis")
    parser.add_argument("--mesh", type=_axes, default=(), help="sizes of the axes of a mesh of several, as 2x2")
    parser.add_argument("--uneven", action="store_true", help="calls with uneven shards, of the database's own sizes")
    parser.add_argument("--functions", action="store_true", help="functions with closed forms, in place of operators")
    parser.add_argument("--samples", type=int, default=3, help="calls of each entry")
    parser.add_argument("--backward", action="store_true", help="with the gradients of all floating operands")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for one entry")
    parser.add_argument("--markdown", type=Path, help="write the tables to their section of this file")
    return parser.parse_args()


def _axes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


if __name__ == "__main__":
    raise SystemExit(main())
