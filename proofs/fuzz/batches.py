"""Checks many programs in a few processes: a hang, a crash or a failure does not affect other programs."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection, wait
from typing import Any

import attrs
import torch

from proofs.fuzz.check import check, check_seed
from proofs.fuzz.environment import Rejected
from proofs.fuzz.generate import truth
from proofs.fuzz.outcome import Outcome, Status
from proofs.fuzz.program import Program, default_dtype

_context = multiprocessing.get_context("fork")  # a child has torch imported already
_BATCH = 400  # the most programs of one process
_CLEAN = (Status.RIGHT, Status.COMMS, Status.SKIPPED)  # nothing was raised: the process can go on


def check_seeds(
    seeds: Sequence[int],
    *,
    jobs: int = 2,
    seconds: float = 60.0,
    avoid: frozenset[str] = frozenset(),
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
    repeat: bool = True,
    known: Callable[[int], Program | None] = lambda seed: None,
    run: Callable[[Program], Outcome] | None = None,
    check_one: Callable[..., Outcome] = check_seed,
) -> Generator[Outcome, None, None]:
    """Check the programs of seeds in processes, and yield outcomes as they complete.

    A process checks programs until one raises an error or gives a wrong result. Then a new process takes the remaining
    programs, and the failing one is run again in a separate process. If it fails only after earlier programs, because
    of state that they left in torch, it is still a failure, of a separate kind.

    Args:
        seeds: the seeds of the programs.
        jobs: the number of processes at a time.
        seconds: the time limit of one program.
        avoid: operators of the pool and transforms; programs with one of them are not run.
        within: makes the context in which a process checks programs.
        repeat: whether a program that fails is run again in a separate process.
        known: from a seed, its program, or None if the process is to generate it.
        run: runs a program; by default as `check_one` does.
        check_one: generates and checks the program of a seed; its arguments are those of `check_seed`.
    """
    torch.set_num_threads(1)
    share = -(-len(seeds) // max(1, jobs))
    size = max(1, min(_BATCH, share))
    queue = [list(seeds[start : start + size]) for start in range(0, len(seeds), size)][::-1]
    running: list[_Child] = []
    try:
        while queue or running:
            while queue and len(running) < jobs:
                running.append(_Child.start(queue.pop(), avoid, within, known, run, check_one))
            left = min(child.since + seconds for child in running) - time.monotonic()
            wait([child.answers for child in running], max(left, 0.0) + 0.01)
            for child in list(running):
                outcome = child.outcome(seconds)
                if outcome is None:
                    continue
                if outcome.status in _CLEAN and not child.lost:
                    yield outcome
                    if child.seeds:
                        continue
                    child.end()
                    running.remove(child)
                    continue
                child.end()
                running.remove(child)
                if child.seeds:
                    queue.append(child.seeds)
                if child.earlier and repeat and outcome.status not in _CLEAN:
                    outcome = _alone(outcome, child.earlier, seconds, run, check_one)
                yield outcome
    finally:
        for child in running:
            child.end()


def _alone(
    seen: Outcome,
    earlier: Sequence[int],
    seconds: float,
    run: Callable[[Program], Outcome] | None,
    check_one: Callable[..., Outcome],
) -> Outcome:
    """The outcome of a program in a separate process; a failure that occurs only after earlier programs remains one."""
    child = _Child.start([seen.seed], frozenset(), run=run, check_one=check_one)
    outcome = None
    while outcome is None:
        wait([child.answers], 1.0)
        outcome = child.outcome(seconds)
    child.end()
    if outcome.status is not Status.RIGHT:
        return outcome
    message = f"only after {list(earlier)[-5:]}: {seen.message}"
    return attrs.evolve(seen, kind=f"after other programs: {seen.kind}", message=message)


@attrs.define(eq=False)
class _Child:
    seeds: list[int]
    process: Any
    answers: Connection
    since: float
    earlier: list[int] = attrs.field(factory=list)
    generated: bool = False
    lost: bool = False

    @classmethod
    def start(
        cls,
        seeds: list[int],
        avoid: frozenset[str],
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
        known: Callable[[int], Program | None] = lambda seed: None,
        run: Callable[[Program], Outcome] | None = None,
        check_one: Callable[..., Outcome] = check_seed,
    ) -> _Child:
        answers, sender = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_work, args=(list(seeds), avoid, within, known, run, check_one, sender), daemon=True
        )
        process.start()
        sender.close()
        return cls(list(seeds), process, answers, time.monotonic())

    def outcome(self, seconds: float) -> Outcome | None:
        """The next outcome, once there is one."""
        found = self._outcome(seconds)
        if found is not None:
            self.earlier.append(self.seeds.pop(0))
            self.since, self.generated = time.monotonic(), False
            if self.earlier[-1] != found.seed:
                raise RuntimeError(f"expected the outcome of {self.earlier[-1]}, got that of {found.seed}")
            if found.status not in _CLEAN or self.lost:
                self.earlier.pop()
        return found

    def _outcome(self, seconds: float) -> Outcome | None:
        if self.answers.poll():
            try:
                answer = self.answers.recv()
            except EOFError:
                self.process.join()
                return self._lost(Status.CRASH, f"the process ended with {self.process.exitcode}")
            if isinstance(answer, Outcome):
                return answer
            self.generated = True
        if time.monotonic() > self.since + seconds:
            return self._lost(Status.HANG, f"no answer in {seconds:.0f} s")
        return None

    def _lost(self, status: Status, reason: str) -> Outcome:
        """The outcome if there was no answer: skipped during generation of the program, when only plain torch runs."""
        self.lost = True
        return Outcome(self.seeds[0], status if self.generated else Status.SKIPPED, reason, reason)

    def end(self) -> None:
        """Stop the process."""
        self.process.kill()
        self.process.join()
        self.answers.close()


def _work(
    seeds: list[int],
    avoid: frozenset[str],
    within: Callable[[], AbstractContextManager[None]],
    known: Callable[[int], Program | None],
    run: Callable[[Program], Outcome] | None,
    check_one: Callable[..., Outcome],
    sender: Connection,
) -> None:
    with within():
        for seed in seeds:
            sender.send(check_one(seed, lambda: sender.send(None), avoid, known(seed), run))
    sender.close()


def check_apart(program: Program, seconds: float = 60.0) -> Outcome | None:
    """The outcome of a program in a separate process; None if plain torch refuses it."""
    answers, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=_check_program, args=(program, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not answers.poll(seconds):
            return Outcome(program.seed, Status.HANG, "hang", f"no answer in {seconds:.0f} s")
        return answers.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        code = process.exitcode
        return Outcome(program.seed, Status.CRASH, f"the process ended with {code}", f"exit code {code}")
    finally:
        process.kill()
        process.join()


def _check_program(program: Program, sender: Connection) -> None:
    with default_dtype(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            truth(program)
        except Rejected:
            sender.send(None)
            return
        sender.send(check(program))
