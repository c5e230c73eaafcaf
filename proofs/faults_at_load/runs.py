"""Runs of tests, each by a pytest of its own, and a record of what came out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from proofs.faults_at_load.load import measured_load

PASSED, FAILED = "passed", "failed"


@attrs.frozen
class Run:
    """One run of some tests.

    Args:
        began: seconds since 1970.
        seconds: how long it took.
        busy: busy processes that were started beside it.
        load: threads of the machine that could run meanwhile, mean of looks once a second.
        least: as `load`, over the tenth of the looks with the least.
        tests: what became of each.
        errors: the text of each failure.
    """

    began: float
    seconds: float
    busy: int
    load: float
    least: float
    tests: dict[str, str]
    errors: dict[str, str]


def run_tests(arguments: Sequence[str], busy: int, logs: Path) -> Run:
    """Run pytest once; what it prints is in a file of the folder `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w", dir=logs, delete=False) as log:
        report, began = Path(folder, "report.xml"), time.time()
        command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
        with measured_load() as load:
            done = subprocess.run(
                [*command, f"--junitxml={report}", *arguments],
                env={**os.environ, "SPMD_FAULT_RUNS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if done.returncode not in (0, 1):  # neither all passed nor some failed
            raise RuntimeError(f"pytest ended with status {done.returncode}:\n{Path(log.name).read_text()}")
        found = dict(_outcomes(ElementTree.parse(report).getroot()))
    least = sorted(load.samples)[: max(1, len(load.samples) // 10)]
    return Run(
        began,
        time.time() - began,
        busy,
        load.mean,
        sum(least) / max(1, len(least)),
        {name: FAILED if text else PASSED for name, text in found.items()},
        {name: text for name, text in found.items() if text},
    )


def _outcomes(root: ElementTree.Element) -> Iterator[tuple[str, str]]:
    """Each test that ran, and the text of its failure, which is empty if it passed."""
    for case in root.iter("testcase"):
        if case.find("skipped") is None:
            failed = [each for kind in ("failure", "error") if (each := case.find(kind)) is not None]
            name = f"{case.get('file')}::{case.get('name')}"
            yield name, "\n".join(f"{each.get('message')}\n{each.text}" for each in failed)


def append(run: Run, record: Path) -> None:
    """Add a run to a record, at once and whole: several may write."""
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a") as file:
        file.write(json.dumps(attrs.asdict(run)) + "\n")


def read(record: Path) -> list[Run]:
    """All runs of a record, the earliest first."""
    runs = [Run(**json.loads(line)) for line in record.read_text().splitlines()]
    return sorted(runs, key=lambda run: run.began)
