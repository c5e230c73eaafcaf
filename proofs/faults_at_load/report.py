"""The table of a record of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from proofs.faults_at_load.runs import FAILED, PASSED, Run
from proofs.page import table


@attrs.frozen
class Row:
    """The runs of a file of tests.

    Args:
        tests: how many the file has.
        runs: of each, the fewest.
        failures: of all.
        in_a_row: how many runs each of the tests has passed since one failed, the fewest.
    """

    tests: int
    runs: int
    failures: int
    in_a_row: int


def rows(runs: Sequence[Run]) -> dict[str, Row]:
    """By file, what became of its tests.

    >>> runs = [Run(0.0, 9.0, 8, 9.5, 8.0, {"a.py::x": "failed"}, {"a.py::x": "AssertionError"})]
    >>> runs += [Run(9.0, 9.0, 8, 9.5, 8.0, {"a.py::x": "passed", "a.py::y": "passed"}, {}) for _ in range(2)]
    >>> rows(runs)
    {'a.py': Row(tests=2, runs=2, failures=1, in_a_row=2)}
    """
    outcomes: dict[str, list[str]] = {}
    for run in runs:
        for test, outcome in run.tests.items():
            outcomes.setdefault(test, []).append(outcome)
    files = dict.fromkeys(test.partition("::")[0] for test in sorted(outcomes))
    of_files = {file: [outcomes[test] for test in outcomes if test.startswith(f"{file}::")] for file in files}
    return {
        file: Row(
            tests=len(found),
            runs=min(map(len, found)),
            failures=sum(each.count(FAILED) for each in found),
            in_a_row=min(map(_in_a_row, found)),
        )
        for file, found in of_files.items()
    }


def _in_a_row(outcomes: Sequence[str]) -> int:
    passed = 0
    while passed < len(outcomes) and outcomes[-1 - passed] == PASSED:
        passed += 1
    return passed


def markdown(runs: Sequence[Run]) -> str:
    """What a page says of a record."""
    return "\n".join([*_files(runs), "", *_loads(runs), ""])


def _files(runs: Sequence[Run]) -> Iterator[str]:
    head = ("file", "tests", "runs of each", "failures", "passed in a row, each test")
    yield from table(
        head,
        [
            [f"`{file}`", f"{row.tests}", f"{row.runs}", f"{row.failures}", f"{row.in_a_row}"]
            for file, row in rows(runs).items()
        ],
    )


def _loads(runs: Sequence[Run]) -> Iterator[str]:
    """How busy the machine was, and the figures of its extremes."""
    loads = [run.load for run in runs]
    mean = sum(run.load * run.seconds for run in runs) / sum(run.seconds for run in runs)
    yield (
        f"{len(runs)} runs of pytest, {sum(run.seconds for run in runs) / 60:.0f} minutes in all, beside "
        f"{min(run.busy for run in runs)} to {max(run.busy for run in runs)} busy processes. Threads that could run: "
        f"{mean:.1f} in the mean, {min(loads):.1f} to {max(loads):.1f} in single runs, at least "
        f"{min(run.least for run in runs):.1f} in the quietest tenth of a run."
    )


def failures(runs: Sequence[Run]) -> Iterator[str]:
    """The text of each failure, for a terminal."""
    for run in runs:
        for test, text in run.errors.items():
            yield f"{test}, at a load of {run.load:.1f}:\n{text}"
