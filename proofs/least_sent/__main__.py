"""`python -m proofs.least_sent --op PATTERN`: what plans send beside what must be sent, the worst operators first."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from rich.progress import track

from proofs.least_sent.report import markdown
from proofs.least_sent.sweep import Entry, sweep_entry
from proofs.op_sweep.cases import entries, full_name
from proofs.page import write_section
from proofs.pool import Lost, each


def main() -> int:
    """Run the sweep and print, or write, the operators that send more than twice what they must."""
    parser = argparse.ArgumentParser(prog="python -m proofs.least_sent", description=__doc__)
    parser.add_argument("--op", default="", help="part of an entry's name; 'name$' for exactly one")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the mesh")
    parser.add_argument("--samples", type=int, default=3, help="calls of each entry")
    parser.add_argument("--backward", action="store_true", help="with the gradients of all floating operands")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for one entry")
    parser.add_argument("--markdown", type=Path, help="write the tables to their section of this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = entries(options.op)
    work = partial(sweep_entry, ranks=options.ranks, samples=options.samples, backward=options.backward)
    found = [
        Entry(full_name(entry), failure="no answer in time") if isinstance(result, Lost) else result
        for entry, result in track(each(chosen, work, jobs=options.jobs, seconds=options.seconds), total=len(chosen))
    ]
    text = markdown(found, options.ranks)
    print(text)
    if options.markdown:
        write_section(options.markdown, "backward" if options.backward else "forward", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
