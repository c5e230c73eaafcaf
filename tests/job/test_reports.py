"""Rounds of reports, by threads of one process that share a store."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from proofs.scale_of_jobs.counted import CountedStore
from spmd.job import reports
from spmd.job.reports import LONGEST_PATIENCE, PATIENCE, Reports


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    return dist.HashStore() if request.param == "memory" else dist.FileStore(str(tmp_path / "store"), 1)


def exchanged(stores, number, said):
    """What each of the ranks that report hears in a round, by rank."""
    with ThreadPoolExecutor(len(said)) as pool:
        ranks = {rank: Reports(stores[rank], rank, len(stores)) for rank in said}
        heard = {rank: pool.submit(ranks[rank].exchange, number, text) for rank, text in said.items()}
        return [found.result() for found in heard.values()]


def test_all_ranks_hear_all_of_them(store):
    expected = ["a", "b", "a"]
    assert [expected] * 3 == exchanged([store] * 3, 0, dict(enumerate(expected)))


def test_ranks_that_do_not_answer_are_none_in_this_round_only(store, monkeypatch):
    monkeypatch.setattr(reports, "PATIENCE", 0.5)
    assert [["a", None, "c"]] * 2 == exchanged([store] * 3, 0, {0: "a", 2: "c"})
    assert [["a", "b", None]] * 2 == exchanged([store] * 3, 1, {0: "a", 1: "b"})


def test_last_words_are_the_report_of_all_later_rounds(store):
    Reports(store, 1, 3).end("is over")
    for number in range(2):
        assert [["a", "is over", "c"]] * 2 == exchanged([store] * 3, number, {0: "a", 2: "c"})


def test_a_round_without_the_rank_that_collects_has_a_result(store, monkeypatch):
    monkeypatch.setattr(reports, "PATIENCE", 0.5)
    store.add("count0", 1)  # who has begun it dies there
    assert [[None, "b", "c"]] * 2 == exchanged([store] * 3, 0, {1: "b", 2: "c"})


def test_a_rank_asks_the_store_as_often_in_large_jobs():
    def most(ranks):
        shared = dist.HashStore()
        stores = [CountedStore(shared, Counter()) for _ in range(ranks)]
        exchanged(stores, 0, dict.fromkeys(range(ranks), "a"))
        totals = sorted(sum(n for name, n in each.operations.items() if name != "add") for each in stores)
        return totals[-2], totals[-1]  # of all but the one that collects, and of that, but for its pauses

    assert most(4) == most(32)


@pytest.mark.parametrize(
    ("come", "is_all", "looks"),
    [
        ([0, 5, 9], True, 9),  # in time
        ([0, 5], False, 60),  # 3 seconds of 20 looks each
        ([0, 25, 70], True, 70),  # three times as long as the one that took 25
        ([0, 25, 76], False, 75),
        ([0, 50, 140, 179], True, 179),
        ([0, 50, 140, 181], False, 180),  # three times the patience, however slowly they come
    ],
)
def test_where_reports_come_slowly_the_rest_has_more_time(monkeypatch, come, is_all, looks):
    slept = []
    monkeypatch.setattr(reports.time, "sleep", slept.append)
    missing = lambda: max(3, len(come)) - sum(look <= len(slept) for look in come)  # noqa: E731
    assert (is_all, looks) == (reports.wait_until_none(missing, PATIENCE, LONGEST_PATIENCE), len(slept))


def test_the_first_result_of_a_round_holds(store, monkeypatch):
    monkeypatch.setattr(reports, "PATIENCE", 0.5)
    store.add("count0", 1)  # who has begun it is slow
    assert [[None, "b"]] == exchanged([store] * 2, 0, {1: "b"})
    store.add("count0", -2)  # and collects now
    assert [[None, "b"]] == exchanged([store] * 2, 0, {0: "a"})
