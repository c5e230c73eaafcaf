"""Processor time of two versions of the package in turns, case by case: is the new one over the old?

A process for each version stays alive and times one case at a time, so imports, plans and first calls are not measured.
A second process of the old version is the noise floor: what the two differ by is no difference of the code. "At most
the old" is a ratio of at most 1.03, or of the noise where that is larger. A process can be slow as a whole, by where
its memory lies: cases above 1.03 are measured again in new processes, four times at most, and minima count. Cases and
examples are those of this checkout, only the package is another.

    python benchmarks/turns.py --old HEAD~1 call_overhead eager_overhead step_time:tp
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import attrs
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
MODULES = ("call_overhead", "eager_overhead", "step_time")
ROUNDS, STARTS = 7, 5
LIMIT = 1.03
"""The largest ratio that still counts as no difference, if the noise is not larger."""
LEAST_SECONDS = 0.02
"""A measurement calls its case for at least as long."""

Case: TypeAlias = Callable[[], Callable[[], object]]
"""Prepares what is timed: modules of benchmarks have them by name, as `CASES`."""


class Timer(Protocol):
    """Times cases by name, one after the other."""

    def seconds(self, module: str, name: str) -> float:
        """Processor seconds of one call of a case."""


@attrs.frozen
class Turns:
    """The processor seconds of one call of a case, the least of all rounds: old, new, and old once more."""

    name: str
    old: float
    new: float
    again: float

    @property
    def ratio(self) -> float:
        """The time of the new version over the lesser of the old."""
        return self.new / min(self.old, self.again)

    @property
    def noise(self) -> float:
        """The ratio of the slower measurement of the old version to the faster."""
        return max(self.old, self.again) / min(self.old, self.again)

    @property
    def is_over(self) -> bool:
        """Whether the new version takes longer than noise explains."""
        return self.ratio > max(LIMIT, self.noise)

    def least(self, other: Turns) -> Turns:
        """The minima of both measurements."""
        return Turns(self.name, min(self.old, other.old), min(self.new, other.new), min(self.again, other.again))

    @property
    def verdict(self) -> str:
        """The comparison in words."""
        if self.is_over:
            return "over"
        return "at most" if self.ratio <= LIMIT else "at most, by the noise"


class Worker:
    """A process that has the package of one tree, and times a case when asked."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = [sys.executable, __file__, "--serve", str(tree)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, module: str, name: str) -> float:
        """Processor seconds of one call of a case, which is prepared when it is not the one before."""
        return float(self._ask(module, name))

    def names(self, module: str) -> list[str]:
        """The names of a module's cases."""
        return list(self._ask(module, None))

    def _ask(self, *question: str | None) -> Any:
        to, back = self._process.stdin, self._process.stdout
        if to is None or back is None:
            raise RuntimeError("The process of a worker must have pipes.")
        try:
            to.write(json.dumps(question) + "\n")
            to.flush()
            line = back.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"The process that times {self._tree} ended at {question}; its error stands above.")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate()


def serve(tree: Path) -> None:
    """Answer questions for cases and their times on the standard streams; others print to the error stream."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    package = importlib.import_module("spmd").__file__ or ""
    if not Path(package).resolve().is_relative_to(tree.resolve()):
        raise RuntimeError(f"The package must be that of {tree} (got {package}).")
    prepared, call = None, None
    for line in sys.stdin:
        module, name = json.loads(line)
        cases: dict[str, Case] = importlib.import_module(module).CASES
        if name is None:
            print(json.dumps(list(cases)), file=answers, flush=True)
            continue
        if call is None or prepared != (module, name):
            call = None  # frees what the case before holds
            prepared, call = (module, name), cases[name]()
            call()
        print(json.dumps(microseconds(call) / 1e6), file=answers, flush=True)


def microseconds(function: Callable[[], object], repeat: int = 1) -> float:
    """The processor time of one call in microseconds: the best of several timings, so that other load counts least."""
    timer, number = timeit.Timer(function, timer=time.process_time), 1
    while (seconds := timer.timeit(number)) < LEAST_SECONDS:
        number *= 2
    return min([seconds, *timer.repeat(repeat - 1, number)]) / number * 1e6


def compare(module: str, name: str, timers: Sequence[Timer], rounds: int = ROUNDS) -> Turns:
    """Time a case by old, new and old once more, in turns, every other round in reverse: none is always first."""
    found: list[list[float]] = [[], [], []]
    for turn in range(max(rounds, ROUNDS)):
        for index in (0, 1, 2) if turn % 2 == 0 else (2, 1, 0):
            found[index].append(timers[index].seconds(module, name))
    return Turns(f"{module}: {name}", *map(min, found))


@contextlib.contextmanager
def checkout(tree: str, root: Path = ROOT) -> Iterator[Path]:
    """A folder with a version: the one named, or a worktree of the commit of this name, removed afterwards."""
    if Path(tree).is_dir():
        yield Path(tree).resolve()
        return
    git = ["git", "-C", str(root), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), tree], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


@contextlib.contextmanager
def workers(trees: Sequence[Path]) -> Iterator[list[Worker]]:
    """A worker for each tree, ended afterwards."""
    started = [Worker(tree) for tree in trees]
    try:
        yield started
    finally:
        for worker in started:
            worker.close()


def measure(old: Path, new: Path, modules: Sequence[str], rounds: int = ROUNDS) -> list[Turns]:
    """The comparisons of all cases of modules; `module:text` has those whose names contain the text."""
    trees = [old, new, old]
    with workers(trees) as timers:
        texts = [module.partition(":")[::2] for module in modules]
        cases = [(module, name) for module, text in texts for name in timers[1].names(module) if text in name]
        found = {case: compare(*case, timers, rounds) for case in cases}
    for _ in range(STARTS - 1):
        if above := [case for case, turns in found.items() if turns.ratio > LIMIT]:
            with workers(trees) as timers:
                found |= {case: found[case].least(compare(*case, timers, rounds)) for case in above}
    return list(found.values())


def table(found: Sequence[Turns]) -> Table:
    """The table that is printed."""
    result = Table(title="Microseconds of processor time a call, the least of all rounds", title_justify="left")
    for column in ("case", "old", "new", "ratio", "noise", "verdict"):
        result.add_column(column, justify="left" if column in ("case", "verdict") else "right")
    for row in found:
        times = (f"{row.old * 1e6:.1f}", f"{row.new * 1e6:.1f}", f"{row.ratio:.3f}", f"{row.noise:.3f}")
        result.add_row(row.name, *times, row.verdict)
    return result


def main(given: Sequence[str] | None = None) -> int:
    """Print the table; the exit status is 1 if a case of the new version is over the old."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(MODULES), metavar="MODULE[:TEXT]")
    parser.add_argument("--old", default="HEAD", help="a folder with the package, or a commit (HEAD)")
    parser.add_argument("--new", default=str(ROOT), help="the same for the new version (this checkout)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"at least {ROUNDS}")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.serve is not None:
        serve(arguments.serve)
        return 0
    with checkout(arguments.old) as old, checkout(arguments.new) as new:
        found = measure(old, new, arguments.modules, arguments.rounds)
    Console(width=max(110, Console().width)).print(table(found))
    return int(any(row.is_over for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
