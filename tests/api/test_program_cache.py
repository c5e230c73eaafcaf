"""Which programs a jitted function keeps, and the log of compilations."""

import gc
import logging
import weakref

import pytest
import torch

import spmd
from spmd import P
from spmd.api import program_cache
from spmd.ir.graph import Graph

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")


def test_calls_and_programs_are_counted() -> None:
    double = spmd.jit(lambda x: 2 * x, P("data"), mesh=MESH)
    for size in (4, 6, 4, 4):
        double(torch.ones(size))
    assert double.cache_info() == (2, 2, program_cache.MAXSIZE, 2)
    double.cache_clear()
    assert double.cache_info() == (0, 0, program_cache.MAXSIZE, 0)
    assert double(torch.ones(4)).full_tensor().tolist() == [2.0] * 4
    assert double.cache_info().misses == 1


def test_the_least_recently_used_programs_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "MAXSIZE", 3)
    double = spmd.jit(lambda x: 2 * x, P("data"), mesh=MESH)
    programs = {size: weakref.ref(double.compile(torch.ones(size))) for size in (1, 2, 3)}
    double(torch.ones(1))
    for size in range(4, 200):
        double.lower(torch.ones(size)) if size < 6 else double.trace(torch.ones(size))
        assert double.cache_info().currsize == 3
    gc.collect()
    assert [size for size, program in programs.items() if program() is not None] == [1]  # that of the last call
    double.cache_clear()
    gc.collect()
    assert programs[1]() is None


def test_two_hundred_batch_sizes_leave_no_more_than_the_cache_keeps() -> None:
    """Each batch size is a program with its graphs, which go with it; what the planner keeps beside has its bounds."""
    step = spmd.jit(lambda w, x: (x @ w).sin(), (P(), P("data")), mesh=MESH)
    w, programs, graphs = torch.ones(3, 2).double(), {}, {}
    for size in range(1, 201):
        x = torch.full((size, 3), 1 / size).double()
        torch.testing.assert_close(step(w, x).full_tensor(), (x @ w).sin())
        programs[size] = weakref.ref(step.compile(w, x))
        if size in (140, 200):
            gc.collect()
            graphs[size] = sum(type(found) is Graph for found in gc.get_objects())
    assert (200, 128, 128) == step.cache_info()[1:]
    assert list(range(73, 201)) == [size for size, program in programs.items() if program() is not None]
    assert graphs[140] == graphs[200]


def test_a_program_that_is_used_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "MAXSIZE", 2)
    traces = []

    def double(x):
        traces.append(len(x))
        return 2 * x

    jitted = spmd.jit(double, P("data"), mesh=MESH)
    for size in (1, 2, 1, 3, 1, 2):
        jitted(torch.ones(size))
    assert traces == [1, 2, 3, 2]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_the_log_says_what_is_new(caplog: pytest.LogCaptureFixture) -> None:
    @spmd.jit(static_argnames="n", mesh=MESH)
    def f(tree, n=1, **more):
        return tree["w"] * n

    w = torch.ones(4)
    f({"w": w})
    f.cache_clear()
    assert messages(caplog) == []
    with spmd.log_compiles(), caplog.at_level(logging.WARNING, logger="spmd"):
        f({"w": w})
        f({"w": w})
        (said,) = messages(caplog)
        assert said.startswith("Compiling spmd.jit(") and said.endswith('`f({"w": w})`): it was not called before.')
        for call, reason in {
            (lambda: f({"w": torch.ones(6)})): "argument 0['w'] is f32[6] P(), and was f32[4] P()",
            (lambda: f({"w": torch.ones(6).double()})): "argument 0['w'] is f64[6] P(), and was f32[6] P()",
            (lambda: f({"w": spmd.distribute(torch.ones(6).double(), P("data"), MESH)})): "is f64[6] P('data')",
            (lambda: f({"w": w, "b": w})): "the structure of the arguments is",
            (lambda: f({"w": w, "b": w}, n=3)): "it has the arguments 0, 1, and had 0",
            (lambda: f({"w": w, "b": w}, 4)): "static argument 1 is 4, and was 3",
        }.items():
            call()
            (said,) = messages(caplog)
            assert reason in said
        with torch.autocast("cpu"):
            f({"w": w, "b": w}, 4)
        assert "torch's settings differ" in messages(caplog)[0]
    f({"w": torch.ones(7)})
    assert messages(caplog) == []
