"""Measured links: what becomes of the times of collectives."""

import itertools
import time

import pytest

import spmd
from spmd.plan.machine import measure_links, timed_runs
from spmd.plan.machine.link import Link

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
KIND = "all_reduce"
SMALL, MEDIUM, LARGE = measure_links._SMALL, measure_links._MEDIUM, measure_links._LARGE
BESIDE = ("data", measure_links._BESIDE)


def link_of(seconds: dict[int, float], beside: float | None = None) -> Link:
    """The link of an axis like `data`, from the seconds of all_reduces."""
    found = {("data", KIND, size): taken for size, taken in seconds.items()}
    return measure_links._link(MESH, "model", "data", KIND, found | ({} if beside is None else {BESIDE: beside}))


def test_what_passes_beside_computation_is_a_wait():
    """Two ranks send as many bytes as the operand has: at 1 GB/s, after 5 ms of which 1 is taken from computation."""
    seconds = {size: 5e-3 + size / 1e9 for size in (SMALL, MEDIUM, LARGE)}
    for sizes in ((SMALL, LARGE), (SMALL, MEDIUM)):
        found = link_of({size: seconds[size] for size in sizes}, 1e-3)
        assert ("model", KIND) == (found.axis, found.kind)
        assert (1e9, 1e-3, 4e-3) == pytest.approx((found.bandwidth, found.latency, found.wait))
    assert (5e-3, 0) == pytest.approx((link_of(seconds).latency, link_of(seconds).wait))


@pytest.mark.parametrize(("beside", "latency"), [(-1e-3, 0.0), (9e-3, 5e-3)])
def test_what_is_taken_from_computation_is_a_part_of_the_latency(beside, latency):
    found = link_of({SMALL: 5e-3 + SMALL / 1e9, LARGE: 5e-3 + LARGE / 1e9}, beside)
    assert (latency, 5e-3 - latency) == pytest.approx((found.latency, found.wait))


def test_noise_gives_a_link_too():
    found = link_of({SMALL: 2e-3, LARGE: 1e-3}, 1e-4)
    assert LARGE / 1e-3 == pytest.approx(found.bandwidth)
    assert found.latency >= 0 and found.wait >= 0


@pytest.mark.parametrize(("medium", "rounds"), [(1e-4, 12), (7e-4, 6), (4e-2, 5), (1.0, None)])
def test_large_collectives_take_a_limited_time(monkeypatch, medium, rounds):
    """None that would take long, and of others so many that all take a quarter of a second, or five."""
    made = {}

    def in_turns(mesh, runs, count):
        made[{key[-1] for key in runs}.pop() if runs else None] = count
        return [dict.fromkeys(runs, medium)] * count

    monkeypatch.setattr(measure_links, "in_turns", in_turns)
    monkeypatch.setattr(measure_links, "agreed", lambda mesh, seconds: seconds)
    monkeypatch.setattr(measure_links, "_sending", lambda *_: None)
    found = measure_links._large(MESH, ["data", "model"])
    assert rounds == made.get(LARGE)
    assert len(found) == 2 * 5 * len(made.keys() - {None})


@pytest.mark.parametrize(("sharing", "count"), [(0.5, 4), (2.0, 8)])
def test_ranks_that_share_processors_time_blocks_by_these(monkeypatch, sharing, count):
    """Runs double until a block of 5 ms is over."""
    runs = []
    for clock, each in (("perf_counter", 2e-3), ("process_time", 1e-3)):
        monkeypatch.setattr(time, clock, lambda each=each: each * len(runs))
    assert timed_runs.on_average(MESH, lambda: runs.append(None), sharing=sharing) == pytest.approx(2e-3)
    assert count == len(runs)


def test_processors_that_ranks_share_are_kept_by_all_threads(monkeypatch):
    for clock, step in (("thread_time", 1.0), ("process_time", 3.0)):
        ticks = itertools.count(0.0, step)
        monkeypatch.setattr(time, clock, ticks.__next__)
    seconds = [timed_runs.once_on_processors(MESH, lambda: None, sharing=sharing) for sharing in (0.25, 2.0)]
    assert [1.0, 6.0] == seconds
