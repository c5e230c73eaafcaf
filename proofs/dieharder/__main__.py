"""What dieharder says of the words that `spmd.random` draws.

    python -m proofs.dieharder                       # 1 GB of each of six streams: some hours
    python -m proofs.dieharder --impl philox4x32 --stream split --tests 0 100 --gigabytes 0.1

It needs the program `dieharder`, of Debian's package of this name. A test reads the file from its beginning; one that
needs more than there is reads it again, and does not count. The exit status is 1 if a test fails.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import attrs

from proofs.dieharder.streams import STREAMS, write
from proofs.page import table, write_section
from spmd.random.generators.implementations import GENERATORS

TESTS: Mapping[int, tuple[int, ...]] = MappingProxyType({
    **dict.fromkeys((0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 15, 16, 17, 100, 101), ()),
    102: (), 200: tuple(range(1, 13)), 201: (2, 3, 4, 5), 202: (2, 3, 4, 5), 203: (0, 1),
    **dict.fromkeys(range(204, 210), ()),
})  # fmt: skip
"""The tests that dieharder calls good, by number, with the lengths of tuples where one is given."""

COLUMNS = ("generator", "stream", "GB", "p-values", "passed", "weak", "failed", "read again", "minutes")


@attrs.frozen
class Result:
    """A p-value of a test, and what dieharder says of it; the test may have read the file more than once."""

    name: str
    tuples: str
    probability: str
    verdict: str
    is_read_again: bool


def main() -> int:
    """Run the tests, print what they say, and write the report if one is named; 1 if a test fails."""
    options = arguments()
    failed = False
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        file = Path(folder, "words")
        for impl in options.impl:
            for stream in options.stream:
                begin = time.monotonic()
                write(file, stream, impl, round(options.gigabytes * 1e9), options.seed)
                results = [result for test in options.tests for result in run(file, test)]
                minutes = (time.monotonic() - begin) / 60
                text = report(impl, stream, results, options, minutes)
                print(text, flush=True)
                if options.markdown:
                    write_section(options.markdown, f"{impl}, {stream}", text)
                failed |= any(result.verdict == "FAILED" and not result.is_read_again for result in results)
    return int(failed)


def run(file: Path, test: int) -> Iterator[Result]:
    """The results of a test of a file."""
    for length in TESTS[test] or (None,):
        command = ["dieharder", "-g", "201", "-f", str(file), "-d", str(test)]
        done = subprocess.run(
            [*command, *(() if length is None else ("-n", str(length)))], capture_output=True, text=True, check=True
        )
        again = "rewound" in done.stdout + done.stderr
        rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()]
        for row in rows:
            if row[-1] in ("PASSED", "WEAK", "FAILED"):
                yield Result(row[0], row[1], row[4], row[5], again)


def report(impl: str, stream: str, results: Sequence[Result], options: argparse.Namespace, minutes: float) -> str:
    """A row for a stream, and the results that are not good."""
    counted = [result for result in results if not result.is_read_again]
    verdicts = [str(sum(result.verdict == name for result in counted)) for name in ("PASSED", "WEAK", "FAILED")]
    again = str(len(results) - len(counted))
    row = [impl, stream, f"{options.gigabytes:g}", str(len(counted)), *verdicts, again, f"{minutes:.0f}"]
    others = [
        f"{result.name} {result.tuples}: {result.verdict.lower()}, p = {result.probability}"
        + (", read again" if result.is_read_again else "")
        for result in results
        if result.verdict != "PASSED"
    ]
    tests = " ".join(map(str, options.tests))
    lines = [f"Seed {options.seed}, tests {tests}, {datetime.date.today()}.", "", *table(COLUMNS, [row]), ""]
    return "\n".join([*lines, *(f"- {other}" for other in others), ""])


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs.dieharder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--impl", nargs="+", choices=GENERATORS, default=list(GENERATORS), help="generators")
    parser.add_argument("--stream", nargs="+", choices=STREAMS, default=list(STREAMS), help="streams")
    parser.add_argument("--tests", nargs="+", type=int, choices=TESTS, default=list(TESTS), metavar="N")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each stream")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the words are written, for a time")
    parser.add_argument("--markdown", type=Path, help="the report to write a section of")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
