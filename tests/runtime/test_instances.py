"""Virtual ranks that hold equal tensors share them: the same values as apart, and every one computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import spmd
from spmd import P, collectives
from spmd.collectives import virtual
from spmd.core.mesh import Mesh, make_mesh
from spmd.core.spec import TensorMeta
from spmd.ir.graph import Graph, Operation, Value
from spmd.lowering.program import LocalProgram
from spmd.runtime import VirtualProgram
from spmd.runtime.lockstep import generate_lockstep
from spmd.runtime.varying import varying_axes
from spmd.runtime.virtual import run_in_lockstep

ops, aten = torch.ops.spmd, torch.ops.aten


class Calls(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def apart(program: LocalProgram, inputs: list[Any]) -> list[tuple[torch.Tensor, ...]]:
    """The outputs where every rank computes everything by itself."""
    mesh = program.mesh
    ranks = [generate_lockstep(program.graph(where), mesh, [rank]) for rank, where in enumerate(mesh.coordinates())]
    return run_in_lockstep(mesh, [rank.start(inputs) for rank in ranks])


def gradients(w: torch.Tensor, x: torch.Tensor) -> Any:
    loss = lambda w, x: F.layer_norm(torch.tanh(x @ w), (w.shape[1],)).square().mean() + w.exp().sum()  # noqa: E731
    return torch.func.grad_and_value(loss, argnums=(0, 1))(w, x)


def draws(w: torch.Tensor, x: torch.Tensor) -> Any:
    return F.dropout(x, 0.3) @ w, torch.rand_like(w) * w, torch.randn(3), torch.multinomial(w.exp()[0], 2)


def size_of_x() -> int:
    return spmd.core.mesh.current_mesh(None).axis_size("x")


def manual(w: torch.Tensor, x: torch.Tensor) -> Any:
    def local(w: torch.Tensor, x: torch.Tensor) -> Any:
        index, total = collectives.axis_index("x"), collectives.psum(x @ w, "x")
        sent = collectives.ppermute(x, "x", [(0, 0)])
        noise = torch.rand_like(w) + torch.bernoulli(w.sigmoid() * (index + 1) / 9)
        return total * index, sent, collectives.all_gather(w * index, "x"), noise * index, w.exp() + total.sum()

    return spmd.shard_map(local, in_specs=(P(), P(None, "x")), out_specs=(P("x"),) * 5, check=False)(
        w[: x.shape[1] // size_of_x()], x
    )


def views(w: torch.Tensor, x: torch.Tensor) -> Any:
    """Results that share memory, and one that is an argument."""
    return w, w.t(), w[0], torch.arange(4), x.flatten(), x[:, :1] + w.sum(), w.view(-1)[:3] * 2


@pytest.mark.parametrize("axes", [{"x": 3}, {"x": 2, "y": 2}, {"x": 1, "y": 3}], ids=str)
@pytest.mark.parametrize("length", [12, 5, 1])
@pytest.mark.parametrize("function", [gradients, draws, views, manual])
def test_values_are_those_of_ranks_apart(function: Callable[..., Any], length: int, axes: dict[str, int]) -> None:
    mesh = make_mesh(axes, runtime="virtual")
    if function is manual:
        length = 6
    w, x = torch.randn(6, 4), torch.randn(length, 6)
    for specs in ((P(), P("x")), (P("x"), P(None, "x")), (P(None, "x"), P())):
        step = spmd.jit(function, specs, mesh=mesh)
        program = step.lower(w, x)
        shards = [value.shards for value in spmd.distribute((w, x), specs, mesh)]
        torch.manual_seed(0)
        expected = apart(program, shards)
        torch.manual_seed(0)
        found = VirtualProgram(program)(list(shards))
        for spec, ours, theirs in zip(program.output_specs, found, expected, strict=True):
            for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                assert torch.equal(one, other), (spec, rank)
                assert one.stride() == other.stride(), (spec, rank)


def counted(mesh: Mesh, function: Callable[..., Any], in_specs: Any, *args: torch.Tensor) -> Counter[str]:
    machine = spmd.Machine(flops=1e30, memory_bandwidth=1e30)  # it moves nothing to save work
    program = spmd.jit(function, in_specs, mesh=mesh, machine=machine).lower(*args)
    shards = [value.shards for value in spmd.distribute(args, in_specs, mesh)]
    run = VirtualProgram(program)
    with Calls() as calls:
        run(list(shards))
    return calls.counts


@pytest.mark.parametrize(
    ("spec", "count"), [(P(), 1), (P("x"), 2), (P(None, "y"), 3), (P("x", "y"), 6), (P(("y", "x")), 6)], ids=str
)
def test_a_value_is_computed_once_for_the_ranks_that_hold_it(spec: P, count: int) -> None:
    mesh = make_mesh({"x": 2, "y": 3}, runtime="virtual")
    assert count == counted(mesh, torch.exp, (spec,), torch.ones(6, 6))["exp"]


def test_what_follows_a_sum_over_ranks_is_computed_once() -> None:
    counts = counted(make_mesh({"x": 4}, runtime="virtual"), lambda x: x.exp().sum().sin(), (P("x"),), torch.ones(8, 2))
    assert (4, 1) == (counts["exp"], counts["sin"])


def test_what_depends_on_the_rank_is_computed_by_each() -> None:
    def local(x: torch.Tensor) -> torch.Tensor:
        return (x.neg() * collectives.axis_index("x")).exp()

    mesh = make_mesh({"x": 4, "y": 2}, runtime="virtual")
    function = spmd.shard_map(local, mesh, in_specs=P(), out_specs=P("x"))
    counts = counted(mesh, function, (P(),), torch.ones(2))
    assert (1, 4) == (counts["neg"], counts["exp"])


def test_ranks_with_other_programs_compute_for_themselves() -> None:
    mesh = make_mesh({"x": 4, "y": 2}, runtime="virtual")  # shards of 2, 2, 1, and 0 rows
    counts = counted(mesh, lambda w, x: (w.neg(), x.exp()), (P(), P("x")), torch.ones(3), torch.ones(5, 2))
    assert (3, 4) == (counts["neg"], counts["exp"])


def test_a_collective_is_computed_once_for_groups_with_equal_operands() -> None:
    mesh = make_mesh({"x": 2, "y": 3}, runtime="virtual")
    calls = [((torch.tensor(float(rank)), "sum", ["x"]), {}) for rank in range(2)]
    found = virtual.run(ops.all_reduce.default, mesh, [calls[rank // 3] for rank in range(6)])
    assert 1 == len(set(map(id, found)))
    assert 1 == counted(mesh, lambda x: x.sum(0).exp(), (P("x"),), torch.ones(4, 2))["add"]


def value(name: str) -> Value:
    return Value(name, TensorMeta((4,), torch.float32))


def test_a_result_varies_as_the_operands_of_all_ranks_do() -> None:
    """One rank's program replaces all of its operand by the other: what it sums does not vary along y, here only."""
    mesh = make_mesh({"x": 2, "y": 2}, runtime="virtual")
    graphs = []
    for number in range(2):
        a, b, total = value("a"), value("b"), value("total")
        operand = [a, b][number]
        reduced = Operation(ops.all_reduce.default, (operand, "sum", ["x"]), {}, (total,))
        graphs.append(Graph((a, b), (), (reduced,), (total,)))
    specs = [spmd.DTensorSpec.make(mesh, spec, TensorMeta((4,), torch.float32)) for spec in (P("x"), P(("x", "y")))]
    varying = varying_axes(graphs, mesh, specs)
    assert [frozenset("y")] * 2 == [varying[graph.outputs[0]] for graph in graphs]


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (ops.all_reduce.default, ("sum", ["x"]), "y"),
        (ops.all_gather.default, (0, 4, ["y"]), "x"),
        (ops.all_gather_invariant.default, (0, 4, ["x", "y"]), ""),
        (ops.reduce_scatter.default, ("sum", 0, 4, ["z"]), "xyz"),
        (ops.permute.default, ([1, 0], [4], ["z"]), "xyz"),
        (ops.shard.default, (0, 2, ["z"]), "xyz"),
        (ops.to_partial.default, ("sum", ["z"]), "xyz"),
        (ops.pcast.default, ("invariant", "varying", ["z"]), "xy"),
        (aten.bernoulli.default, (), "xy"),
        (aten.bernoulli.p, (0.5,), ""),
        (aten.neg.default, (), "xy"),
    ],
)
def test_along_which_axes_results_vary(op: Any, args: tuple[Any, ...], expected: str) -> None:
    mesh = make_mesh({"x": 2, "y": 2, "z": 2}, runtime="virtual")
    x, result = value("x"), value("result")
    graph = Graph((x,), (), (Operation(op, (x, *args), {}, (result,)),), (result,))
    spec = spmd.DTensorSpec.make(mesh, P("x", partial={"y": "sum"}), TensorMeta((4,), torch.float32))
    assert frozenset(expected) == varying_axes([graph], mesh, [spec])[result]


def test_every_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        spmd.debug.print("{} {}", w.sum(), x.sum())
        return x

    mesh = make_mesh({"x": 2}, runtime="virtual")
    mapped = spmd.shard_map(function, mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    spmd.jit(mapped, (P(), P("x")), P("x"), mesh=mesh)(torch.tensor([2]), torch.tensor([3, 4]))
    assert "[rank 0] 2 3\n[rank 1] 2 4\n" == capsys.readouterr().out


def test_instances_are_freed_one_by_one() -> None:
    """Each rank's operand is freed when the rank has used it, not when all have, unless an effect reads it later."""
    mesh = make_mesh({"x": 4}, runtime="virtual")
    a, b, total = value("a"), value("b"), value("total")
    reduced = Operation(ops.all_reduce.default, (a, "sum", ["x"]), {}, (total,))
    negated = Operation(aten.neg.default, (a,), {}, (b,))
    freed = [
        "v0, v0s[index] = v0s[index], None" in generate_lockstep(graph, mesh, range(4)).generated.source
        for graph in (Graph((a,), (), order, (b, total)) for order in ((reduced, negated), (negated, reduced)))
    ]
    assert [True, False] == freed


def test_writes_never_reach_a_shared_tensor() -> None:
    mesh = make_mesh({"x": 4}, runtime="virtual")
    twice = spmd.jit(lambda w: w * 2, P(), P(), mesh=mesh)(torch.ones(3))
    assert 1 == len({shard.data_ptr() for shard in twice.shards})

    def local(w: torch.Tensor) -> torch.Tensor:
        w.add_(1)
        return w * (collectives.axis_index("x") + 1)

    mapped = spmd.shard_map(local, mesh, in_specs=P(), out_specs=P("x"))
    expected = torch.tensor([3.0, 6.0, 9.0, 12.0]).repeat_interleave(3)
    assert torch.equal(expected, spmd.jit(mapped, P(), mesh=mesh)(twice).full_tensor())
    with spmd.disable_jit():
        assert torch.equal(expected, mapped(twice).full_tensor())
    held = twice.shards
    alias = twice.detach()
    twice.add_(1)
    assert [3.0] * 3 == twice.tolist() == alias.tolist()
    assert all(shard.tolist() == [2.0] * 3 for shard in held)


def test_values_of_a_constant_are_copies() -> None:
    """A result that is a constant of the program can be written to, and the next call has the constant."""
    table = torch.ones(3)
    step = spmd.jit(lambda x: (x, table), P("x"), (P("x"), P()), mesh=make_mesh({"x": 2}, runtime="virtual"))
    for _ in range(2):
        _, result = step(torch.ones(2))
        assert all(shard.tolist() == [1.0] * 3 for shard in result.shards)
        result.shards[0].zero_()


@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_step_holds_replicas_once(donated: tuple[int, ...]) -> None:
    """Of results that are replicated, eight ranks hold the bytes of one."""
    mesh = make_mesh({"x": 8}, runtime="virtual")
    step = spmd.jit(lambda w, x: w - (x @ w).mean() * w, (P(), P("x")), P(), mesh=mesh, donate_argnums=donated)
    w, x = spmd.distribute((torch.randn(4, 4), torch.randn(8, 4)), (P(), P("x")), mesh)
    for _ in range(2):
        expected = w.full_tensor() - (x.full_tensor() @ w.full_tensor()).mean() * w.full_tensor()
        w = step(w, x)
        assert 1 == len({shard.data_ptr() for shard in w.shards})
        torch.testing.assert_close(w.full_tensor(), expected)
