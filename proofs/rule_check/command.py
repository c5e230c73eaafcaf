"""The command: what to prove, the progress, and the exit status."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from proofs.op_sweep.cases import entries
from proofs.rule_calls.recorded import Recorded, select
from proofs.rule_check.layouts import LayoutProof, check_all, layout_tasks
from proofs.rule_check.prove import prepare, prove, record_all, tasks
from proofs.rule_check.tables import Proof
from spmd.rules import RULES, Rule

_Op = torch._ops.OpOverload

_CALLS = 4
"""The most recorded calls of an operator that are run."""

_DESCRIPTION = """\
Proves the sharding rules by execution. Every strategy of every rule is run on virtual shards (two and three, even,
uneven and empty ones; partial operands in parts that do not cancel) and compared with the unsharded operator, on calls
made by hand and on calls that torch's operator database makes, forward and backward. With --missing, the plain operator
is also run on all placements of the operands, to find rows that are right and that no strategy covers. With --layouts,
every operator is run on operands in other memory instead, and what its kernel needs is compared with
spmd/rules/layouts.py."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m proofs.rule_check", description=_DESCRIPTION)
    parser.add_argument("--op", default="", metavar="PATTERN", help="part of an operator's name; 'name$' for that one")
    parser.add_argument("--missing", action="store_true", help="search for missing rows too")
    parser.add_argument("--layouts", action="store_true", help="prove what memory layouts kernels need, not the rules")
    parser.add_argument("--handmade", action="store_true", help="without the calls of torch's operator database")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the summary into this page, at its marks")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    return parser


def main(arguments: Sequence[str] | None = None, rules: Mapping[_Op, Rule] = RULES) -> int:
    """Prove rules; 1 if anything is wrong, 2 if there is nothing to prove."""
    options = _parser().parse_args(arguments)
    console = Console()
    torch.set_num_threads(1)
    prepare(database=not options.handmade)
    with Progress(console=console, transient=True) as progress:
        recorded: list[Recorded] = []
        if not options.handmade:
            recording = progress.add_task("calls of torch's database", total=len(entries()))
            recorded = record_all(options.jobs, lambda count: progress.advance(recording, count))
        proof = _layouts(options, recorded, progress) if options.layouts else _rules(options, recorded, rules, progress)
    if proof is None:
        console.print(f"No operator with a rule has {options.op!r} in its name. Leave --op out to prove all.")
        return 2
    proof.show(console)
    if options.json:
        options.json.write_text(json.dumps(proof.as_json(), indent=1) + "\n")
    if options.markdown:
        proof.write_markdown(options.markdown)
    return int(proof.failed)


def _rules(
    options: argparse.Namespace, recorded: Sequence[Recorded], rules: Mapping[_Op, Rule], progress: Progress
) -> Proof | None:
    """The findings for the chosen rules; None if no rule is chosen."""
    chosen = tasks(options.op, select((call for call in recorded if call.provable), _CALLS), rules)
    proof = Proof(options.missing)
    proving = progress.add_task("rules", total=len(chosen))
    for found in prove(chosen, missing=options.missing, jobs=options.jobs):
        proof.take(found)
        progress.advance(proving)
    return proof if chosen else None


def _layouts(options: argparse.Namespace, recorded: Sequence[Recorded], progress: Progress) -> LayoutProof | None:
    """The findings for the chosen operators' kernels; None if no operator is chosen."""
    chosen = layout_tasks(options.op, select(recorded, _CALLS))
    proof = LayoutProof()
    proving = progress.add_task("memory layouts", total=len(chosen))
    for found in check_all(chosen, jobs=options.jobs):
        proof.take(found)
        progress.advance(proving)
    return proof if chosen else None
