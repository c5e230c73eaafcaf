"""Checks rules in processes, on handwritten calls and on those that torch's operator database makes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from proofs.op_sweep.cases import entries
from proofs.pool import Lost, each
from proofs.rule_calls import ARBITRARY, CALLS, UNCHECKED, UNSEARCHED
from proofs.rule_calls.draws import Calls
from proofs.rule_calls.recorded import Recorded, recall, record
from spmd.rules import RULES, Rule, find_rule
from spmd.testing.rule_check import Report, check_rule

_CHUNK = 16
"""The number of database entries that one process runs."""

_Op = torch._ops.OpOverload


@attrs.frozen(eq=False)
class Task:
    """A rule and the calls that it is checked on."""

    op: _Op
    rule: Rule
    calls: Calls

    def prove(self, missing: bool) -> Report:
        """Run it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values, checked = self.op not in ARBITRARY, self.op not in UNCHECKED
            searched = missing and self.op not in UNSEARCHED
            return check_rule(self.op, self.rule, self.calls, missing=searched, values=values, checked=checked)


def prepare(database: bool) -> None:
    """Do once, before the fork, what every process would repeat: torch imports and operator definitions of a trace."""
    make_fx(torch.neg, tracing_mode="fake")(torch.ones(2))
    for entry in entries("linear_cross_entropy") if database else ():
        record(entry)


def record_all(jobs: int, advance: Callable[[int], None]) -> list[Recorded]:
    """The calls of operators that the database makes.

    Args:
        jobs: how many processes.
        advance: called with the number of entries that were just done.
    """
    found: list[Recorded] = []
    every = entries()
    chunks = [every[start : start + _CHUNK] for start in range(0, len(every), _CHUNK)]
    for chunk, recorded in each(chunks, _record_chunk, jobs=jobs, seconds=300.0):
        if isinstance(recorded, Lost):
            raise RuntimeError(f"The calls of {', '.join(entry.name for entry in chunk)} are not recorded: {recorded}")
        for data in recorded:
            found += recall(data)
        advance(len(chunk))
    return found


def _record_chunk(chunk: Sequence[Any]) -> list[bytes]:
    return [record(entry) for entry in chunk]


def tasks(pattern: str, recorded: Mapping[_Op, Calls], rules: Mapping[_Op, Rule] = RULES) -> list[Task]:
    """The rules of the operators whose name contains `pattern` (`name$` matches exactly), with their calls."""
    names = {op: str(op) for op in {*rules, *recorded}}
    exact, wanted = pattern.endswith("$"), pattern.removesuffix("$")
    chosen = sorted((name, op) for op, name in names.items() if (wanted == name if exact else wanted in name))
    found = []
    for _, op in chosen:
        rule, calls = find_rule(op, rules), [*CALLS.get(op, ()), *recorded.get(op, ())]
        if rule is not None:
            found.append(Task(op, rule, calls))
    return found


def prove(chosen: Sequence[Task], *, missing: bool, jobs: int, seconds: float = 300.0) -> Iterator[Report | str]:
    """Yield the reports as they complete, or a message for a rule whose process crashed or took too long."""
    for task, report in each(chosen, lambda task: task.prove(missing), jobs=jobs, seconds=seconds):
        if isinstance(report, Lost):
            end = "took too long" if report.exitcode is None else f"ended its process with {report.exitcode}"
            yield f"{task.op}: {end}"
        else:
            yield report
