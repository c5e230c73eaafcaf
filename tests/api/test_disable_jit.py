"""`spmd.disable_jit`: values and gradients of the compiled functions, and errors instead of hangs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
import uncompiled_cases
from conftest import OnRanks

import spmd
from spmd import P
from spmd.collectives import axis_index, psum
from spmd.errors import DivergenceError, SpmdError, TraceError

MESH = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
AXES = {"x": 2, "y": 2}


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """No test may leave a rank's thread behind, which would wait for ever."""
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in jit"])
@pytest.mark.parametrize("name", uncompiled_cases.CASES)
def test_results_are_those_of_the_compiled_function(name: str, inside: bool) -> None:
    uncompiled_cases.compare(name, inside, MESH)


@pytest.mark.parametrize("name", ["mixed types", "writes", "gathers", "moves", "uneven", "nested", "first rank"])
def test_results_on_processes(on_ranks: OnRanks, name: str) -> None:
    on_ranks(uncompiled_cases.compare, AXES, name, False)


@pytest.mark.parametrize(
    "case", [uncompiled_cases.transform_in_jit, uncompiled_cases.divergence, uncompiled_cases.one_rank_fails]
)
def test_on_both_runtimes(on_ranks: OnRanks, case: Callable[..., None]) -> None:
    on_ranks(case, AXES)


def test_a_jitted_function_runs_once_on_whole_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    def function(x: torch.Tensor, scale: int) -> Any:
        print("x is", x.tolist(), type(x).__name__)
        x += 1  # its own copy
        if x.sum() > 2:  # a decision by values, which no compiled function can make
            x = spmd.reshard(x * scale, P("y"))
        return {"a": x, "b": spmd.constrain(x, P("x")).sum()}

    step = spmd.jit(function, P("x"), {"a": P("y"), "b": None}, mesh=MESH, static_argnums=1)
    held = torch.arange(2)
    for given in (held, spmd.distribute(held, P("x"), MESH)):
        with spmd.disable_jit():
            found = step(given, scale=2)
        assert capsys.readouterr().out == "x is [0, 1] Tensor\n"
        assert found["a"].spec.pspec == P("y") and found["b"].spec.pspec == P()
        assert found["a"].full_tensor().tolist() == [2, 4] and found["b"].item() == 6
    assert held.tolist() == [0, 1]
    with pytest.raises(TraceError):
        step(held, 2)


def test_a_jitted_function_in_another_is_a_part_of_it() -> None:
    inner = spmd.jit(lambda x: x * 2, P("x"), P("y"), mesh=MESH)
    outer = spmd.jit(lambda x: torch.func.grad(lambda x: inner(x).sin().sum())(x), P("x"), P("x"), mesh=MESH)
    x = torch.arange(4.0)
    with spmd.disable_jit():
        found = outer(x)
    torch.testing.assert_close(found.full_tensor(), 2 * (2 * x).cos())


def test_ranks_run_one_by_one_up_to_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        rank = int(axis_index(("x", "y")))
        print(rank, "has", a.item())
        total = psum(a, ("x", "y"))
        spmd.debug.print("{}", total.item() + rank)
        print(rank, "goes on")
        return total

    with spmd.disable_jit():
        spmd.shard_map(body, MESH, P(("x", "y")), P())(torch.arange(4.0))
    expected = [f"{rank} has {float(rank)}" for rank in range(4)]
    expected += [f"[rank {rank}] {6.0 + rank}" for rank in range(4)]
    expected += [f"{rank} goes on" for rank in range(4)]
    assert expected == capsys.readouterr().out.splitlines()


def test_pdb_stops_in_each_rank() -> None:
    code = """
        import torch, spmd
        from spmd import P
        from spmd.collectives import psum

        def body(a):
            breakpoint()
            return psum(a, "x")

        mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
        with spmd.disable_jit():
            y = spmd.shard_map(body, mesh, P("x"), P())(torch.tensor([3.0, 4.0]))
        print("sum", y.item())
    """
    commands = "p a.item()\nc\np a.item()\nc\n"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], input=commands, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert ["3.0", "4.0", "sum 7.0"] == [
        line.removeprefix("(Pdb) ").removeprefix("(Pdb) ")
        for line in done.stdout.splitlines()
        if line.removeprefix("(Pdb) ").removeprefix("(Pdb) ")[:1] in tuple("0123456789s")
    ]


def test_the_traceback_of_a_rank_is_kept() -> None:
    with pytest.raises(ValueError, match="a mistake") as caught, spmd.disable_jit():
        spmd.shard_map(uncompiled_cases.failing, MESH, P("x"), P())(torch.arange(8.0))
    assert "failing" in [entry.name for entry in caught.traceback]


def test_ranks_that_wait_are_unwound() -> None:
    ended = []

    def body(a: torch.Tensor) -> torch.Tensor:
        rank = int(axis_index(("x", "y")))
        if rank == 2:
            raise ValueError("a mistake")
        try:
            return psum(a, "x")
        finally:
            ended.append(rank)

    with pytest.raises(ValueError, match="a mistake"), spmd.disable_jit():
        spmd.shard_map(body, MESH, P("x"), P())(torch.arange(8.0))
    assert [0, 1] == ended


def test_a_rank_that_catches_everything_is_stopped_at_its_next_operator() -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        if int(axis_index(("x", "y"))) == 1:
            raise ValueError("a mistake")
        for _ in range(3):
            try:
                a = psum(a, "x")
            except BaseException:
                continue
        return a

    with pytest.raises(ValueError, match="a mistake"), spmd.disable_jit():
        spmd.shard_map(body, MESH, P("x"), P())(torch.arange(8.0))


def test_shapes_that_differ_name_the_line() -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        return psum(a[: 1 + int(axis_index("x"))], "x")

    with (
        pytest.raises(DivergenceError, match=r"different shapes.*Rank 0 calls all_reduce.*psum\(a\["),
        spmd.disable_jit(),
    ):
        spmd.shard_map(body, MESH, P("x"), P())(torch.arange(8.0))


def test_random_numbers_are_those_of_one_device_on_all_ranks() -> None:
    def body(a: torch.Tensor) -> Any:
        drawn = torch.rand(2)
        total = psum(a, "x")
        return drawn + torch.rand(2) + 0 * total.sum(), torch.nn.functional.dropout(torch.ones(64), 0.5)

    mapped = spmd.shard_map(body, MESH, P("x"), P())
    torch.manual_seed(5)
    expected = torch.rand(2) + torch.rand(2), torch.nn.functional.dropout(torch.ones(64), 0.5)
    after = torch.rand(1)
    torch.manual_seed(5)
    with spmd.disable_jit():
        found = mapped(torch.zeros(2))
    assert all(torch.equal(mine.full_tensor(), its) for mine, its in zip(found, expected, strict=True))
    assert torch.equal(after, torch.rand(1))


def test_derivatives_from_outside_draw_again_where_ranks_run() -> None:
    def f(w: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(4)
        loss = spmd.shard_map(lambda w, a: psum((w * w * a).sum(), "x"), MESH, (P(), P("x")), P())
        return torch.func.grad(lambda w: loss(w, drawn))(w)

    torch.manual_seed(5)
    drawn, after = torch.rand(4), torch.rand(1)
    torch.manual_seed(5)
    with spmd.disable_jit():
        w = torch.ones(2, requires_grad=True)
        spmd.jit(f, P(), mesh=MESH)(w).full_tensor().sum().backward()
    torch.testing.assert_close(w.grad, 2 * (drawn[:2] + drawn[2:]))
    assert torch.equal(after, torch.rand(1))


def test_types_are_checked_as_in_a_trace() -> None:
    with spmd.disable_jit():
        with pytest.raises(spmd.ShardingError, match=r"it is varying since it entered the body at .*test_disable_jit"):
            spmd.shard_map(lambda a: a.sum(), MESH, P("x"), P())(torch.ones(4))
        with pytest.raises(TraceError, match=r"writes a value that is varying along 'x' in place"):
            spmd.shard_map(lambda a: torch.zeros(2).add_(a), MESH, P("x"), P("x"))(torch.ones(4))
        with pytest.raises(TraceError, match=r"aten.sin.default at .* is not linear in f32\[4\], which is unreduced"):
            spmd.shard_map(lambda a: a.sin(), MESH, P(partial={"x": "sum"}), P())(torch.ones(4))


def test_settings_of_the_caller_hold_on_all_ranks() -> None:
    seen = []

    def body(a: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), (a @ a).dtype, torch.ones(1).device.type))
        return psum(a, "x")

    with spmd.disable_jit(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        spmd.shard_map(body, MESH, P("x"), P())(torch.ones(4, 2))
    assert [(True, torch.bfloat16, "cpu")] * 4 == seen  # as in a trace, gradients can be taken


def _loss(mapped: Any) -> Any:
    return lambda a, w: mapped(a, w).square().sum()


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, a, w: torch.func.grad(_loss(f), (0, 1))(a, w),
    "vjp": lambda f, a, w: torch.func.vjp(f, a, w)[1](a[:, :2] + 0),
    "jvp": lambda f, a, w: torch.func.jvp(f, (a, w), (a, w)),
    "hessian": lambda f, a, w: torch.func.hessian(lambda w: _loss(f)(a, w))(w),
    "grad of grad": lambda f, a, w: torch.func.grad(lambda w: torch.func.grad(_loss(f), 1)(a, w).square().sum())(w),
    "linearize": lambda f, a, w: torch.func.linearize(lambda w: f(a, w), w)[1](w),
    "vmap": lambda f, a, w: torch.vmap(f, (None, 0))(a, torch.stack([w, w + w])),
    "vmap of grad": lambda f, a, w: torch.vmap(torch.func.grad(_loss(f)), (None, 0))(a, torch.stack([w, w + w])),
}


@pytest.mark.parametrize(
    "wrap", [lambda f: f, lambda f: spmd.jit(f, (P("x"), P(None, "y")), P("x"), mesh=MESH)], ids=["shard_map", "jit"]
)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_from_outside_are_those_of_the_compiled_function(name: str, wrap: Any) -> None:
    def body(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return psum(torch.tanh(a @ w), "y")[:, :2]

    function = wrap(spmd.shard_map(body, MESH, (P("x"), P(None, "y")), P("x")))
    a = spmd.distribute(uncompiled_cases.X, P("x"), MESH)
    w = spmd.distribute(uncompiled_cases.W, P(None, "y"), MESH)
    expected = TRANSFORMS[name](function, a, w)
    with spmd.disable_jit():
        found = TRANSFORMS[name](function, a, w)
    for mine, its in zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(mine.full_tensor(), its.full_tensor(), rtol=1e-5, atol=1e-6)


def test_autograd_from_outside() -> None:
    function = spmd.shard_map(lambda a: psum(a.sin(), "x"), MESH, P("x"), P())
    x = spmd.distribute(torch.arange(4.0), P("x"), MESH).requires_grad_()
    with spmd.disable_jit():
        function(x).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.arange(4.0).cos())


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: spmd.jit(f, P("x"), P("x"), mesh=MESH)], ids=["alone", "jit"])
def test_closed_over_tensors_of_transforms_from_outside_are_refused(wrap: Any) -> None:
    x = spmd.distribute(torch.ones(4), P("x"), MESH)

    def loss(scale: torch.Tensor) -> torch.Tensor:
        return wrap(spmd.shard_map(lambda a: a * scale, MESH, P("x"), P("x")))(x).sum()  # type: ignore[no-any-return]

    with spmd.disable_jit(), pytest.raises(TraceError, match="on which a transform from outside acts"):
        torch.func.grad(loss)(torch.tensor(2.0))


def test_refusals() -> None:
    abstract = spmd.make_mesh({"x": 2}, runtime="abstract")
    with spmd.disable_jit(), pytest.raises(spmd.MeshError, match="is abstract"):
        spmd.jit(lambda x: x, P(), P(), mesh=abstract)(torch.ones(2))
    expected = r"has spec P\('y'\) but in_specs says P\('x'\)"
    with spmd.disable_jit(), pytest.raises(spmd.ShardingError, match=expected):
        spmd.jit(lambda x: x, P("x"), P(), mesh=MESH)(spmd.distribute(torch.ones(2), P("y"), MESH))
    with spmd.disable_jit(), pytest.raises(TraceError, match=r"Result 1 of .* must be a tensor or a number"):
        spmd.jit(lambda x: (x, len), P("x"), P(), mesh=MESH)(torch.ones(2))

    def enters(x: torch.Tensor) -> torch.Tensor:
        with spmd.disable_jit():
            return x + 1

    with pytest.raises(SpmdError, match="Enter it around the call"):
        spmd.jit(enters, P(), P(), mesh=MESH)(torch.ones(2))
