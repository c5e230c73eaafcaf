"""Histories of programs: what differs first between ranks."""

import pytest

from spmd.collectives.distributed import history
from spmd.collectives.distributed.history import History


def after(runs):
    """The history of a rank that has run the programs of these letters."""
    found = History()
    numbers = {name: found.number(name) for name in "abc"}
    for name in runs:
        found.add(numbers[name])
    return found


def test_the_same_runs_have_the_same_mark():
    assert after("abc").mark == after("abc").mark
    marks = [after(runs).mark for runs in ("", "a", "b", "aa", "ab", "ba", "abc")]
    assert len(marks) == len(set(marks))


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (("ab", "ba"), "run 1 is of a, program 0 on rank 0; b, program 1 on rank 1"),
        (("abc", "abb", "abc"), "run 3 is of c, program 2 on ranks 0, 2; b, program 1 on rank 1"),
        (("ab", "a"), "run 2 is of b, program 1 on rank 0; no program yet on rank 1"),
        (("aaaa", "baaa"), "4 programs on ranks 0, 1, and they differ before the last 3"),
        (("a" * 9, "a"), "run 7 is of a, program 0 on rank 0; no program yet on rank 1"),
    ],
)
def test_the_first_difference_is_named(monkeypatch, runs, message):
    monkeypatch.setattr(history, "SHOWN", 3)
    every = [after(run) for run in runs]
    assert message == every[0].difference({rank: ran.ran for rank, ran in enumerate(every)})


def test_ranks_that_know_start_again():
    parted = after("ab")
    parted.forget()
    assert after("").mark == parted.mark
