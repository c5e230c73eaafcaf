"""The command line of a sweep: its arguments, its runs with their progress, and the files that it writes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs
from rich.progress import Progress

from proofs.op_sweep.outcome import BAD, Outcome, summarize
from proofs.page import write_section

_Setup = TypeVar("_Setup", bound=attrs.AttrsInstance)


@attrs.frozen
class Report(Generic[_Setup]):
    """All outcomes under one setup, and the seconds that they took."""

    setup: _Setup
    outcomes: list[Outcome]
    seconds: float

    def data(self) -> dict[str, Any]:
        """The report as JSON data, with the counts."""
        return {**attrs.asdict(self), "summary": summarize(self.outcomes)}

    @classmethod
    def of(cls, data: Mapping[str, Any], setup: Callable[..., _Setup]) -> Report[_Setup]:
        """The report that produced `data`."""
        return cls(setup(**data["setup"]), [Outcome(**found) for found in data["outcomes"]], data["seconds"])

    @property
    def bad(self) -> list[Outcome]:
        """The outcomes with an error, a wrong result, a hang or a crash."""
        return [outcome for outcome in self.outcomes if outcome.status in BAD]


def arguments(parser: argparse.ArgumentParser, setups: Mapping[str, Any], seconds: float) -> argparse.Namespace:
    """The command line: the parser's own options, and those of every sweep."""
    parser.add_argument("--setup", nargs="+", choices=setups, default=list(setups), help="what to run; by default all")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=seconds, help="time for one subject")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    parser.add_argument("--resume", action="store_true", help="run only setups that the JSON file does not have yet")
    parser.add_argument("--markdown", type=Path, help="write the tables to their section of this file")
    options = parser.parse_args()
    if options.resume and not options.json:
        parser.error("--resume needs --json FILE, the file to go on with.")
    return options


def run(
    options: argparse.Namespace,
    setups: Mapping[str, _Setup],
    sweep: Callable[..., Iterator[Outcome]],
    count: int,
    sections: Callable[[Mapping[str, Report[_Setup]]], Mapping[str, str]],
) -> dict[str, Report[_Setup]]:
    """Run the requested setups, and write the files after each, and first with what is resumed.

    Args:
        options: the command line.
        setups: all setups by name, in the order of the tables.
        sweep: runs one setup (with `jobs`, `seconds`) and yields outcomes as they complete.
        count: the number of outcomes of a setup.
        sections: the sections of the page by name, written from the reports so far.
    """
    reports = _read(options.json, type(next(iter(setups.values())))) if options.resume else {}
    if reports:
        _write(options, reports, sections)
    with Progress() as progress:
        for name in options.setup:
            if name in reports:
                continue
            start, outcomes = time.monotonic(), []
            found = sweep(setup=setups[name], jobs=options.jobs, seconds=options.seconds)
            for outcome in progress.track(found, count, description=name):
                outcomes.append(outcome)
                if outcome.status in BAD:
                    line = f"{name}: {outcome.name}: {outcome.status.value}: {outcome.reason}"
                    progress.console.print(line, markup=False)
            outcomes.sort(key=lambda outcome: outcome.name)
            reports[name] = Report(setups[name], outcomes, time.monotonic() - start)
            _write(options, {name: reports[name] for name in setups if name in reports}, sections)
    return reports


def _read(file: Path, setup: Callable[..., _Setup]) -> dict[str, Report[_Setup]]:
    found = json.loads(file.read_text()) if file.exists() else {}
    return {name: Report.of(data, setup) for name, data in found.items()}


def _write(
    options: argparse.Namespace,
    reports: Mapping[str, Report[_Setup]],
    sections: Callable[[Mapping[str, Report[_Setup]]], Mapping[str, str]],
) -> None:
    if options.json:
        data = {name: report.data() for name, report in reports.items()}
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.markdown:
        for name, text in sections(reports).items():
            write_section(options.markdown, name, text)
