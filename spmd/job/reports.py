"""Rounds of reports in the store of torch.distributed, each at the cost of a few operations a process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

PATIENCE = 3.0
"""Seconds that processes have to report, on a machine that is not busy."""

SLOWER, LONGEST_PATIENCE = 3.0, 3.0
"""How much longer than the slowest so far the others may take to report, and how often PATIENCE they have at most."""

LAST = 1.0
"""Seconds that the process which keeps the store waits for the others to end, too."""

PAUSE = 0.05
"""Seconds between two looks of who waits for the others."""

LONGEST = 2000
"""Characters of a report."""


class Reports:
    """What the processes of a job report to each other, in rounds, and the last words of those that have ended.

    The first to report in a round collects what all have said and writes it down for the others.

    Args:
        store: for this purpose only.
        rank, size: of this process, and of the job.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._appends: bool = store.has_extended_api()  # type: ignore[attr-defined]  # missing in the stubs

    def has_begun(self, number: int) -> bool:
        """Whether some process has reported in a round."""
        return self._store.check([f"count{number}"])

    def exchange(self, number: int, text: str) -> list[str | None]:
        """Report, and wait for the others.

        Returns:
            The report of each rank, None for those that do not answer in time; the same on all ranks.
        """
        self._append(f"round{number}", text)
        if self._store.add(f"count{number}", 1) == 1:
            self._collect(number)
        try:
            self._store.wait([f"result{number}"], timedelta(seconds=5 * PATIENCE))
        except RuntimeError:  # DistStoreError, or that of a file
            self._collect(number)  # who should have done it is gone, or slow: the first result holds
        found: list[str | None] = [None] * self._size
        for text, ranks in json.loads(self._store.get(f"result{number}")):
            for rank in ranks:
                found[rank] = text
        self._store.add(f"heard{number}", 1)
        return found

    def end(self, text: str) -> None:
        """Leave the last words of this process, which are its report in all later rounds."""
        self._append("ends", text)
        self._store.add("ended", 1)

    def all_have_ended(self) -> bool:
        """Whether all processes have ended, which is waited for, but not long."""
        return wait_until_none(lambda: self._size - self._count("ended"), LAST)

    def wait_until_heard(self, number: int) -> None:
        """Wait until those that have reported in a round have read its result, but not for ever."""
        wait_until_none(lambda: self._count(f"count{number}") - self._count(f"heard{number}"), PATIENCE)

    def _collect(self, number: int) -> None:
        """Wait for the reports of a round, and write them down: each text once, with the ranks whose report it is."""
        count = f"count{number}"
        said: dict[int, str] = {}

        def missing() -> int:
            absent = self._size - self._count(count) - self._count("ended")
            if absent > 0:
                return absent
            said.update(self._read(number))
            return self._size - len(said)

        if not wait_until_none(missing, PATIENCE, LONGEST_PATIENCE):
            said.update(self._read(number))
        ranks: dict[str, list[int]] = {}
        for rank, text in sorted(said.items()):
            ranks.setdefault(text, []).append(rank)
        self._store.compare_set(f"result{number}", "", json.dumps(list(ranks.items())))

    def _read(self, number: int) -> dict[int, str]:
        """What ranks have said in a round, or last."""
        return {**self._entries(f"round{number}"), **self._entries("ends")}

    def _append(self, key: str, text: str) -> None:
        if self._appends:
            entry = f"{json.dumps([self._rank, text[:LONGEST]])}\n"
            self._store.append(key, entry)  # type: ignore[attr-defined]
        else:  # files, which are for small jobs
            self._store.set(f"{key} {self._rank}", text[:LONGEST])

    def _entries(self, key: str) -> dict[int, str]:
        if self._appends:
            lines = self._store.get(key).decode().splitlines() if self._store.check([key]) else []
            return dict(json.loads(line) for line in lines)
        keys = {rank: f"{key} {rank}" for rank in range(self._size)}
        return {rank: self._store.get(name).decode() for rank, name in keys.items() if self._store.check([name])}

    def _count(self, key: str) -> int:
        return self._store.add(key, 0)


def wait_until_none(missing: Callable[[], int], seconds: float, most: float = 1.0) -> bool:
    """Wait until nothing is missing, so many seconds, or longer where a busy machine lets this thread wait.

    Args:
        missing: how many of those that are waited for have not come.
        seconds: how long.
        most: where what comes takes long, the rest has SLOWER times as long as the last that came, and at most so many
            times the seconds.

    Returns:
        Whether nothing is missing.

    >>> found = iter([2, 2, 1, 1, 0])
    >>> wait_until_none(lambda: next(found), 0.1), wait_until_none(lambda: next(found), 0.1)
    (False, True)
    """
    looks, limit, longest = 0, seconds / PAUSE, most * seconds / PAUSE
    before = left = missing()
    while left > 0 and looks < limit:
        time.sleep(PAUSE)
        looks += 1
        left = missing()
        if left < before:
            before, limit = left, max(limit, min(SLOWER * looks, longest))
    return left <= 0
