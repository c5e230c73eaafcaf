"""Threads that run one at a time and meet: each runs up to its next call, and all calls are answered together."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import attrs

T = TypeVar("T")

ENDED: Any = object()
"""Stands for the call of a thread that has ended."""


class StoppedError(BaseException):
    """Ends a thread whose run has failed elsewhere; no Exception, so that `except Exception` lets it pass."""


@attrs.define(eq=False)
class _Runner(Generic[T]):
    """One of the threads, and what it says when it hands over: its call, its result or its error."""

    thread: threading.Thread
    go: threading.Semaphore = attrs.field(factory=lambda: threading.Semaphore(0))
    call: Any = None
    answer: Any = None
    result: T | None = None
    error: BaseException | None = None


class Baton(Generic[T]):
    """Runs functions in threads, of which only one runs at any time, and the caller's thread in between.

    Args:
        functions: what each thread runs; `meet` may be called in it.
        answer: from the calls of all threads, `ENDED` for one that has ended, to their answers; it may raise.
        around: `around(number)`: a context, entered in the caller's thread while a thread runs.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[], T]],
        answer: Callable[[Sequence[Any]], Sequence[Any]],
        around: Callable[[int], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._answer, self._around, self._stopped = answer, around, False
        self._back = threading.Semaphore(0)
        self._runners = [self._runner(number, function) for number, function in enumerate(functions)]

    def _runner(self, number: int, function: Callable[[], T]) -> _Runner[T]:
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=lambda: context.run(self._run, number, function), name=f"rank {number}", daemon=True
        )
        return _Runner(thread)

    def run(self) -> list[T]:
        """Run all threads to their ends.

        Returns:
            The results of the functions.

        Raises:
            BaseException: the first error of a function or of `answer`; all other threads are stopped.
        """
        try:
            for number, runner in enumerate(self._runners):
                runner.thread.start()
                self._let_run(number)
            while any(runner.call is not ENDED for runner in self._runners):
                answers = self._answer([runner.call for runner in self._runners])
                for number, answer in enumerate(answers):
                    self._runners[number].answer = answer
                    self._let_run(number)
        except BaseException:
            self._stop()
            raise
        return [runner.result for runner in self._runners]  # type: ignore[misc]

    def _let_run(self, number: int) -> None:
        """Let a thread run up to its next call or its end."""
        runner = self._runners[number]
        with self._around(number):
            runner.go.release()
            self._back.acquire()
        if runner.error is not None:
            raise runner.error

    def _stop(self) -> None:
        """End the threads that wait, one after the other; one that runs, after an interrupt, ends at its next call."""
        self._stopped = True
        for runner in self._runners:
            if runner.thread.is_alive() and runner.call is not None and runner.call is not ENDED:
                runner.go.release()
                runner.thread.join()

    def meet(self, number: int, call: Any) -> Any:
        """In a thread: hand over, and return the answer to a call when all others have made theirs."""
        self.check_runs()
        runner = self._runners[number]
        runner.call = call
        self._back.release()
        runner.go.acquire()
        self.check_runs()
        runner.call, answer, runner.answer = None, runner.answer, None
        return answer

    def check_runs(self) -> None:
        """In a thread: end it if the run has failed."""
        if self._stopped:
            raise StoppedError

    def _run(self, number: int, function: Callable[[], T]) -> None:
        runner = self._runners[number]
        runner.go.acquire()
        try:
            runner.result = function()
        except BaseException as error:  # the caller's thread raises it
            runner.error = error
        finally:
            runner.call = ENDED
            self._back.release()
