"""`spmd.debug.print`: what each rank holds, in rank order, as often and in the order that the function says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spmd
from spmd import P, debug
from spmd.collectives import axis_index, pcast, psum
from spmd.lowering.verify import verify

MESH = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
LINE = spmd.make_mesh({"x": 2}, runtime="virtual")


def printed(capsys: pytest.CaptureFixture[str], function: Any, *args: Any) -> list[str]:
    """The lines that a call prints; the second call of a jitted function must print the same."""
    capsys.readouterr()
    function(*args)
    first = capsys.readouterr().out.splitlines()
    function(*args)
    assert capsys.readouterr().out.splitlines() == first
    return first


def test_jit_prints_the_shards_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        debug.print("{0} and {w} by {name!r}", x, w=w, name="me")
        return x.sin(), w.sin()

    step = spmd.jit(function, (P("x"), P("y")), (P("x"), P("y")), mesh=MESH)
    x, w = torch.arange(4), torch.arange(1, 5) * 10
    assert [
        f"[rank {2 * i + j}] tensor([{2 * i}, {2 * i + 1}]) and tensor([{20 * j + 10}, {20 * j + 20}]) by 'me'"
        for i in range(2)
        for j in range(2)
    ] == printed(capsys, step, x, w)
    verify(step.lower(x, w))


def test_printing_adds_no_communication_and_changes_no_sharding() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, prints: bool) -> torch.Tensor:
        hidden = (x @ w).relu()
        if prints:
            debug.print("{} {} {}", x, w, hidden)
        return hidden.view(4, 2, 8).sin() @ w.t()

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    plans = [
        spmd.jit(function, (P("x"), P(None, "y")), P("x"), mesh=MESH, static_argnums=2).plan(x, w, prints)
        for prints in (False, True)
    ]
    kinds = [[(comm.kind, comm.axes, comm.bytes) for comm in plan.comms] for plan in plans]
    assert kinds[0] == kinds[1] and kinds[0]
    assert plans[0].seconds == plans[1].seconds


def test_a_pending_sum_is_reduced_first(capsys: pytest.CaptureFixture[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        debug.print("{}", total)
        return total

    step = spmd.jit(function, P("x"), P(), mesh=LINE)
    assert ["[rank 0] 6.0", "[rank 1] 6.0"] == printed(capsys, step, torch.arange(4.0))
    assert ["all_reduce"] == [comm.kind for comm in step.plan(torch.arange(4.0)).comms]


def test_shard_map_prints_the_value_of_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        debug.print("index {}", axis_index("x"))
        total = psum(a, "x")
        debug.print("total {:.1f}", total)
        return total

    alone = spmd.shard_map(body, MESH, P(("x", "y")), P("y"))
    expected = [f"[rank {rank}] index {rank // 2}" for rank in range(4)]
    expected += [f"[rank {rank}] total [{(2.0, 4.0)[rank % 2]}]" for rank in range(4)]
    assert expected == printed(capsys, alone, torch.arange(4.0))
    assert expected == printed(capsys, spmd.jit(alone, P(("x", "y")), P("y"), mesh=MESH), torch.arange(4.0))


def test_an_unreduced_value_is_printed_as_each_summand(capsys: pytest.CaptureFixture[str]) -> None:
    def body(a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        summand = pcast(a, "x", to="unreduced")
        debug.print("{} beside {}", summand, c)
        return psum(summand, "x")

    mapped = spmd.shard_map(body, LINE, (P("x"), P()), P())
    expected = ["[rank 0] tensor([1.]) beside 7", "[rank 1] tensor([2.]) beside 7"]
    assert expected == printed(capsys, mapped, torch.tensor([1.0, 2.0]), torch.tensor(7))


def test_along_automatic_axes_each_rank_prints_its_shard(capsys: pytest.CaptureFixture[str]) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        debug.print("{}", a)
        return a

    inner = spmd.shard_map(body, MESH, P("x"), P("x"), axis_names={"x"})
    step = spmd.jit(inner, P("x", "y"), P("x", "y"), mesh=MESH)
    expected = ["[rank 0] tensor([[0]])", "[rank 1] tensor([[1]])", "[rank 2] tensor([[2]])", "[rank 3] tensor([[3]])"]
    assert expected == printed(capsys, step, torch.arange(4).view(2, 2))


def prints_square(x: torch.Tensor) -> torch.Tensor:
    debug.print("{}", x)
    return x * x


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad(prints_square),
        lambda x: torch.func.jvp(prints_square, (x,), (torch.ones_like(x),))[1],
        torch.func.grad(torch.func.grad(lambda x: prints_square(x) * x)),
        torch.func.jacfwd(torch.func.grad(lambda x: prints_square(x) * x)),
    ],
    ids=["grad", "jvp", "grad of grad", "jacfwd of grad"],
)
def test_a_differentiated_value_prints_and_keeps_its_gradient(
    capsys: pytest.CaptureFixture[str], transform: Any
) -> None:
    x = torch.tensor(3.0)
    step = spmd.jit(transform, P(), P(), mesh=LINE)
    expected = transform(x)
    assert ["[global] 3.0"] == capsys.readouterr().out.splitlines()
    assert ["[rank 0] 3.0", "[rank 1] 3.0"] == printed(capsys, step, x)
    torch.testing.assert_close(step(x).full_tensor(), expected)


def test_transforms_from_outside_print_once(capsys: pytest.CaptureFixture[str]) -> None:
    step = spmd.jit(prints_square, P(), P(), mesh=LINE)
    x = spmd.distribute(torch.tensor(3.0), P(), LINE)
    assert ["[rank 0] 3.0", "[rank 1] 3.0"] == printed(capsys, torch.func.grad(step), x)
    assert torch.func.grad(step)(x).item() == 6.0


def test_a_cotangent_prints_in_the_backward_pass(capsys: pytest.CaptureFixture[str]) -> None:
    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            debug.print("cotangent {}", cotangent)
            return cotangent

    def loss(x: torch.Tensor) -> torch.Tensor:
        debug.print("x {}", x)
        return Watched.apply(x).square()  # type: ignore[no-any-return]

    x = spmd.distribute(torch.tensor(3.0), P(), LINE)
    expected = [f"[rank {rank}] {line}" for line in ("x 3.0", "cotangent 6.0") for rank in (0, 1)]
    inside = spmd.jit(torch.func.grad(loss), P(), P(), mesh=LINE)
    assert expected == printed(capsys, inside, x)
    assert expected == printed(capsys, torch.func.grad(spmd.jit(loss, P(), P(), mesh=LINE)), x)


def test_vmap_prints_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        debug.print("{} {:.0f}", x, y)
        return x * y

    step = spmd.jit(torch.vmap(function, (1, None)), (P(None, "x"), P()), P("x"), mesh=LINE)
    expected = ["[rank 0] tensor([[0, 4]]) 7", "[rank 1] tensor([[1, 5]]) 7"]
    assert expected == printed(capsys, step, torch.tensor([[0, 1], [4, 5]]), torch.tensor(7.0))


def test_lines_without_tensors_and_with_several_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        debug.print("shape {0.shape} {{}}", x)
        debug.print("a\n{!r:>3}", 1)
        return x

    step = spmd.jit(function, P("x"), P("x"), mesh=LINE)
    expected = [f"[rank {rank}] shape torch.Size([4]) {{}}" for rank in (0, 1)]
    expected += [f"[rank {rank}] {line}" for rank in (0, 1) for line in ("a", "  1")]
    assert expected == printed(capsys, step, torch.arange(4))


def test_uneven_and_empty_shards(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = spmd.make_mesh({"x": 3}, runtime="virtual")
    step = spmd.jit(prints_square, P("x"), P("x"), mesh=mesh)
    expected = ["[rank 0] tensor([0, 1])", "[rank 1] tensor([2, 3])", "[rank 2] tensor([], dtype=torch.int64)"]
    assert expected == printed(capsys, step, torch.arange(4))


def test_outside_of_programs(capsys: pytest.CaptureFixture[str]) -> None:
    debug.print("{:.1f}", torch.tensor([0.5, 1.5]))
    debug.print("{}", spmd.distribute(torch.arange(2), P("x"), LINE))
    expected = ["[global] [0.5, 1.5]", "[rank 0] tensor([0])", "[rank 1] tensor([1])"]
    assert expected == capsys.readouterr().out.splitlines()


def test_equal_calls_are_all_kept_under_a_memory_limit(capsys: pytest.CaptureFixture[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        debug.print("{}", x[0, 0])
        debug.print("{}", x[0, 0])
        early = x.exp()
        debug.print("{}", x[0, 0])
        return (x @ x).sin() + (x @ x.t()).cos() * early

    x = torch.zeros(64, 64)
    free = spmd.jit(function, P("x"), P("x"), mesh=LINE)
    step = spmd.jit(function, P("x"), P("x"), mesh=LINE, memory_limit=free.plan(x).memory.peak - 1)
    assert ["[rank 0] 0.0", "[rank 1] 0.0"] * 3 == printed(capsys, step, x)


def test_a_saved_plan_prints(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    x = torch.arange(2)
    path = tmp_path / "plan.json"
    spmd.jit(prints_square, P("x"), P("x"), mesh=LINE).plan(x).save(path)
    step = spmd.jit(prints_square, P("x"), P("x"), mesh=LINE, plan=path)
    assert ["[rank 0] tensor([0])", "[rank 1] tensor([1])"] == printed(capsys, step, x)


@pytest.mark.parametrize(
    ("fmt", "values", "message"),
    [
        ("{}", ([torch.ones(2)],), "was given a list with tensors in it"),
        (" ".join(["{}"] * 6), [torch.ones(1, 1, 1)] * 6, "was given 6 tensors, of 3, 3, 3, 3, 3, 3 dims"),
    ],
    ids=["container", "too many"],
)
def test_refusals(fmt: str, values: Any, message: str) -> None:
    with pytest.raises(spmd.SpmdError, match=message):
        debug.print(fmt, *values)
