"""Lowering of plans written by hand: values against one device, and the operators that each rank runs."""

from __future__ import annotations

import attrs
import pytest
import torch
from handmade import PlanBuilder, lowered, operators, run

import spmd
from spmd import collectives
from spmd.core.mesh import Mesh, make_mesh
from spmd.core.spec import P, TensorMeta
from spmd.errors import PlanError
from spmd.ir.graph import Graph
from spmd.lowering.lower import lower
from spmd.lowering.passes import PASSES
from spmd.lowering.verify import verify
from spmd.plan.cost.account import account

aten = torch.ops.aten


def mesh_of(**axes: int) -> Mesh:
    return make_mesh(axes, runtime="virtual")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [8, 7, 1])
def test_row_parallel_matmul(size: int, rows: int) -> None:
    builder = PlanBuilder(mesh_of(m=size))
    x, w = builder.input("x", (rows, 6), P(None, "m")), builder.input("w", (6, 5), P("m"))
    product = builder.call(aten.mm.default, (x, w), [((rows, 5), P(partial={"m": "sum"}))])
    plan = builder.plan(builder.move(product, P()))
    a, b = normal(rows, 6), normal(6, 5)
    torch.testing.assert_close(run(plan, a, b)[0], a @ b)
    assert operators(lowered(plan)) == ["mm", "all_reduce"][: 1 if size == 1 else 2]


def test_ranks_with_equal_shapes_share_a_program() -> None:
    builder = PlanBuilder(mesh_of(d=4))
    x = builder.input("x", (5, 2), P("d"))
    program = lowered(builder.plan(builder.call(aten.neg.default, (x,), [((5, 2), P("d"))])))
    graphs = [program.graph((index,)) for index in range(4)]
    assert [graphs[0] is graph for graph in graphs] == [True, True, False, False]
    assert len(set(graphs)) == 3


@pytest.mark.parametrize(("seq", "size"), [(6, 2), (6, 3), (5, 2), (5, 4), (2, 4)])
def test_inner_atom_is_gathered_by_view_collective_view(seq: int, size: int) -> None:
    """`[b * s, d]` with `s` sharded is locally `[b * (s / n), d]`."""
    builder = PlanBuilder(mesh_of(m=size))
    x = builder.input("x", (4, seq, 3), P(None, "m"))
    flat = builder.call(aten.view.default, (x, [4 * seq, 3]), [((4 * seq, 3), P(None, "m"))], atoms=[(4, seq), (3,)])
    whole = builder.move(flat, P())
    plan = builder.plan(builder.relabel(whole, [(4 * seq,), (3,)], P()))
    value = normal(4, seq, 3)
    assert torch.equal(run(plan, value)[0], value.view(4 * seq, 3))
    # The view to [4 * s / n, 3] and the one back to [4, s / n, 3] before the gather merge into nothing.
    assert operators(lowered(plan)) == ["all_gather", "reshape"]


@pytest.mark.parametrize(("batch", "collectives"), [(4, ["reshape", "all_gather"]), (3, ["all_gather", "reshape"])])
def test_leading_atom_needs_no_view_where_even(batch: int, collectives: list[str]) -> None:
    builder = PlanBuilder(mesh_of(m=2))
    x = builder.input("x", (batch, 5, 3), P("m"))
    flat = builder.call(aten.view.default, (x, [batch * 5, 3]), [((batch * 5, 3), P("m"))], atoms=[(batch, 5), (3,)])
    plan = builder.plan(builder.relabel(builder.move(flat, P()), [(batch * 5,), (3,)], P()))
    value = normal(batch, 5, 3)
    assert torch.equal(run(plan, value)[0], value.view(batch * 5, 3))
    assert operators(lowered(plan)) == collectives


@pytest.mark.parametrize(("batch", "seq"), [(4, 6), (5, 7), (1, 3), (2, 2)])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (P("d", "m"), P("d")),
        (P("d", "m"), P(None, "m")),
        (P("d", "m"), P()),
        (P("d", "m"), P("d", None, "m")),
        (P("d", "m"), P(None, None, "d")),
        (P(("d", "m")), P("d")),
        (P(("m", "d")), P(None, ("d", "m"))),
        (P("d"), P("d", "m")),
        (P(None, None, "m", partial={"d": "sum"}), P("d")),
        (P(None, "d", partial={"m": "sum"}), P("m", "d")),
    ],
)
def test_redistribution_of_two_atoms(batch: int, seq: int, source: P, target: P) -> None:
    builder = PlanBuilder(mesh_of(d=2, m=3))
    shape = (batch * seq, 4)
    atoms = [(batch, seq), (4,)]
    x = builder.input("x", (batch, seq, 4), source)
    flat = builder.call(aten.view.default, (x, list(shape)), [(shape, source)], atoms=atoms)
    moved = builder.move(flat, target)
    back = builder.call(aten.view.default, (moved, [batch, seq, 4]), [((batch, seq, 4), target)])
    value = normal(batch, seq, 4)
    torch.testing.assert_close(run(builder.plan(back), value)[0], value)


@pytest.mark.parametrize("rows", [6, 5])
def test_equal_calls_on_other_operands(rows: int) -> None:
    """Calls that share a fragment: of one operator and shape, on one operand twice, on two, and in another order."""
    mesh = mesh_of(m=2)

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x - y
        return z, y - x, x - x, x - z, z - x, torch.cat([x, x]), torch.cat([x, y]), x.view(-1), y.view(-1)

    x, y = normal(rows, 4), normal(rows, 4)
    step = spmd.jit(function, (P("m"), P("m")), P("m"), mesh=mesh)
    for expected, result in zip(function(x, y), step(x, y), strict=True):
        torch.testing.assert_close(result.full_tensor(), expected, rtol=0, atol=0)


def test_size_arguments_become_local() -> None:
    builder = PlanBuilder(mesh_of(m=2))
    x = builder.input("x", (6, 1), P("m"))
    wide = builder.call(aten.expand.default, (x, [6, 4]), [((6, 4), P("m"))])
    ones = builder.call(aten.full.default, ([6, 4], 1.0), [((6, 4), P("m"))], kwargs={"dtype": torch.float32})
    total = builder.call(aten.add.Tensor, (wide, ones), [((6, 4), P("m"))])
    value = normal(6, 1)
    plan = builder.plan(total)
    assert torch.equal(run(plan, value)[0], value.expand(6, 4) + 1)
    assert "expand(x, [3, 4])" in lowered(plan).as_text()
    assert "full([3, 4], 1.0, dtype=torch.float32)" in lowered(plan).as_text()


def test_several_results_and_unused_ones() -> None:
    builder = PlanBuilder(mesh_of(m=2))
    x = builder.input("x", (4, 3), P("m"))
    left, _, right = builder.call(aten.split.Tensor, (x, 1, 1), [((4, 1), P("m")), ((4, 1), P("m")), ((4, 1), P("m"))])
    value = normal(4, 3)
    plan = builder.plan(right, left)
    results = run(plan, value)
    assert torch.equal(results[0], value[:, 2:])
    assert torch.equal(results[1], value[:, :1])
    assert lowered(plan).as_text().count("split_1[") == 2


def test_local_body_is_inlined() -> None:
    def body(axes: tuple[str, ...], call: object, x: torch.Tensor, dim: list[int], keepdim: bool) -> torch.Tensor:
        return collectives.psum(torch.sum(x, dim, keepdim), axes)

    builder = PlanBuilder(mesh_of(d=2, m=3))
    x = builder.input("x", (4, 7), P("d", "m"))
    total = builder.call(aten.sum.dim_IntList, (x, [1], True), [((4, 1), P("d"))], body=body, axes=("m",))
    plan = builder.plan(total)
    value = normal(4, 7)
    torch.testing.assert_close(run(plan, value)[0], value.sum(1, keepdim=True))
    assert operators(lowered(plan)) == ["sum", "all_reduce"]
    (comm,) = lowered(plan).collectives
    assert (comm.kind, comm.axes, comm.bytes) == ("all_reduce", ("m",), 3 * 4)  # two floats in blocks of 1, 1, 0
    assert (comm.cause, str(comm.source)) == ("sum over a sharded dim", "model.py:1")


def test_body_sees_the_call_with_its_own_axes_whole() -> None:
    seen = []

    def body(axes: tuple[str, ...], call: object, x: torch.Tensor) -> torch.Tensor:
        seen.append((axes, call.operands, call.results, tuple(x.shape)))  # type: ignore[attr-defined]
        return x.neg()

    builder = PlanBuilder(mesh_of(d=2, m=2))
    x = builder.input("x", (4, 6), P("d", "m"))
    result = builder.call(aten.neg.default, (x,), [((4, 6), P("d", "m"))], body=body, axes=("m",))
    plan = builder.plan(result)
    seen.clear()  # the account of the plan calls the body, too
    lowered(plan).graph()
    local = TensorMeta((2, 3), torch.float32)
    assert seen[0] == (("m",), (TensorMeta((2, 6), torch.float32),), (local,), local.shape)


@pytest.mark.parametrize("count", [2, 5])
def test_groups_become_one_list_operator(count: int) -> None:
    builder = PlanBuilder(mesh_of(d=2))
    xs = [builder.input(f"x{i}", (4, i + 1), P("d")) for i in range(count)]
    ys = [builder.input(f"y{i}", (4, i + 1), P()) for i in range(count)]
    sums = []
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        shard = builder.move(y, P("d"))
        sums.append(builder.call(aten.add.Tensor, (x, shard), [((4, i + 1), P("d"))], kwargs={"alpha": -0.5}, group=1))
    roots = [
        builder.call(aten.addcdiv.default, (s, x, x), [((4, i + 1), P("d"))], kwargs={"value": 2.0}, group=2)
        for i, (s, x) in enumerate(zip(sums, xs, strict=True))
    ]
    plan = builder.plan(*roots)
    a = [normal(4, i + 1) for i in range(count)]
    b = [normal(4, i + 1) for i in range(count)]
    expected = [torch.addcdiv(x - 0.5 * y, x, x, value=2.0) for x, y in zip(a, b, strict=True)]
    for result, truth in zip(run(plan, *a, *b), expected, strict=True):
        torch.testing.assert_close(result, truth)
    names = [name for name in operators(lowered(plan)) if name.startswith("foreach")]
    assert names == ["foreach_add", "foreach_addcdiv"]


def test_list_operators_share_a_scalar_tensor() -> None:
    builder = PlanBuilder(mesh_of(d=2))
    xs = [builder.input(f"x{i}", (4,), P("d")) for i in range(3)]
    scale = builder.input("scale", (), P())
    scaled = [builder.call(aten.mul.Tensor, (x, scale), [((4,), P("d"))], group=7) for x in xs]
    plan = builder.plan(*scaled)
    assert operators(lowered(plan)) == ["foreach_mul"]
    values = [normal(4), normal(4) + 1, normal(4) + 2]
    for result, value in zip(run(plan, *values, torch.tensor(3.0)), values, strict=True):
        assert torch.equal(result, value * 3)


def test_members_that_depend_on_each_other_are_not_joined() -> None:
    builder = PlanBuilder(mesh_of(d=2))
    x = builder.input("x", (4,), P("d"))
    first = builder.call(aten.mul.Tensor, (x, 2.0), [((4,), P("d"))], group=1)
    second = builder.call(aten.mul.Tensor, (first, 2.0), [((4,), P("d"))], group=1)
    plan = builder.plan(second)
    assert operators(lowered(plan)) == ["mul", "mul"]
    assert torch.equal(run(plan, normal(4))[0], normal(4) * 4)


def test_shard_of_full_is_a_smaller_full() -> None:
    builder = PlanBuilder(mesh_of(m=4))
    x = builder.input("x", (8,), P("m"))
    full = builder.call(aten.full.default, ([8], 3.0), [((8,), P())], kwargs={"dtype": torch.float32})
    total = builder.call(aten.add.Tensor, (x, builder.move(full, P("m"))), [((8,), P("m"))])
    plan = builder.plan(total)
    assert operators(lowered(plan)) == ["full", "add"]
    assert torch.equal(run(plan, normal(8))[0], normal(8) + 3)


def test_ranks_may_differ_in_local_operations() -> None:
    """Where two rows of x are held, both shards are one call; where one row is, one of them needs no view."""
    builder = PlanBuilder(mesh_of(d=2, m=2))
    x = builder.input("x", (3, 3, 1), P("d"))
    atoms = [(3, 3), (1,)]
    flat = builder.call(aten.view.default, (x, [9, 1]), [((9, 1), P("d"))], atoms=atoms)
    cut = builder.call(aten.neg.default, (builder.move(flat, P("d", "m")),), [((9, 1), P("d", "m"))], atoms=atoms)
    back = builder.call(aten.view.default, (cut, [3, 3, 1]), [((3, 3, 1), P("d", "m"))])
    plan = builder.plan(back, builder.move(x, P("d", "m")))
    value = normal(3, 3, 1)
    assert [result.tolist() for result in run(plan, value)] == [(-value).tolist(), value.tolist()]


def test_common_subexpressions_and_dead_operations_go() -> None:
    builder = PlanBuilder(mesh_of(m=2))
    x = builder.input("x", (4,), P("m"))
    rows = [builder.call(aten.view.default, (x, [4, 1]), [((4, 1), P("m"))]) for _ in range(2)]
    first, second = (builder.call(aten.exp.default, (row,), [((4, 1), P("m"))]) for row in rows)
    builder.call(aten.sin.default, (x,), [((4,), P("m"))])
    total = builder.call(aten.add.Tensor, (first, second), [((4, 1), P("m"))])
    assert operators(lowered(builder.plan(total))) == ["reshape", "exp", "add"]


@pytest.mark.parametrize("rows", [8, 7])
def test_the_collectives_of_a_plan_are_those_that_run(rows: int) -> None:
    """Whether or not they are needed, equal, or could be one, and in their order beside list operators."""

    def body(axes: tuple[str, ...], call: object, x: torch.Tensor) -> torch.Tensor:
        return x + collectives.psum(x[:1], axes)

    builder = PlanBuilder(mesh_of(m=4))
    x, y = builder.input("x", (rows,), P("m")), builder.input("y", (rows,), P(partial={"m": "sum"}))
    first = builder.call(aten.neg.default, (x,), [((rows,), P("m"))], group=1)
    gathered = builder.move(first, P())
    shard = builder.move(builder.move(y, P()), P("m"))
    second = builder.call(aten.neg.default, (shard,), [((rows,), P("m"))], group=1)
    sums = [builder.call(aten.exp.default, (shard,), [((rows,), P("m"))], body=body, axes=("m",)) for _ in range(2)]
    builder.move(sums[0], P())
    plan = builder.plan(gathered, second, *sums)
    planned = [(comm.kind, comm.axes, comm.bytes) for comm in account(plan).all_comms]
    program = lowered(plan)
    assert planned == [(comm.kind, comm.axes, comm.bytes) for comm in program.collectives]
    assert ["all_reduce", "all_gather", "all_reduce", "all_reduce", "all_gather"] == [kind for kind, *_ in planned]


def test_what_a_plan_computes_again_is_computed_again() -> None:
    builder = PlanBuilder(mesh_of(m=2))
    x = builder.input("x", (4,), P("m"))
    first, second = builder.move(x, P()), builder.move(x, P())
    twice = [builder.call(aten.exp.default, (value,), [((4,), P())]) for value in (first, second, second)]
    total = builder.call(aten.stack.default, (twice,), [((3, 4), P())])
    expected = ["all_gather", "all_gather", "exp", "exp", "exp", "stack"]
    assert operators(lowered(builder.plan(total))) == expected


def test_identity_program_has_no_operations() -> None:
    builder = PlanBuilder(mesh_of(m=2))
    x = builder.input("x", (4,), P("m"))
    view = builder.call(aten.view.default, (x, [4]), [((4,), P("m"))])
    program = lowered(builder.plan(view))
    assert program.graph().operations == ()
    assert program.graph().outputs == program.graph().inputs


def test_constants_are_lifted() -> None:
    builder = PlanBuilder(mesh_of(m=2))
    x = builder.input("x", (4,), P("m"))
    table = builder.constant(torch.arange(4.0))
    plan = builder.plan(builder.call(aten.mul.Tensor, (x, builder.move(table, P("m"))), [((4,), P("m"))]))
    assert torch.equal(run(plan, normal(4))[0], normal(4) * torch.arange(4.0))


def test_programs_of_an_abstract_mesh_of_many_ranks() -> None:
    mesh = make_mesh({"d": 1024, "m": 64}, runtime="abstract")
    builder = PlanBuilder(mesh)
    x = builder.input("x", (4096, 64), P("d", "m"))
    program = lower(builder.plan(builder.move(x, P("d"))))
    assert program.graph((1023, 63)) is program.graph()
    assert [(comm.kind, comm.bytes) for comm in program.collectives] == [("all_gather", 63 / 64 * 4 * 64 * 4)]


def test_verify_finds_an_operation_that_does_nothing() -> None:
    builder = PlanBuilder(mesh_of(m=2))
    x = builder.input("x", (4,), P("m"))
    builder.call(aten.sin.default, (x,), [((4,), P("m"))])
    program = lower(builder.plan(x), passes=())
    with pytest.raises(PlanError, match=r"operations that do nothing \(eliminate_dead\).*sin"):
        verify(program)


def test_verify_finds_ranks_that_communicate_differently() -> None:
    builder = PlanBuilder(mesh_of(m=2))
    x = builder.input("x", (3,), P("m"))
    builder.move(x, P())

    def silence(graph: Graph) -> Graph:
        return attrs.evolve(graph, operations=()) if graph.inputs[0].meta.shape == (1,) else graph

    with pytest.raises(PlanError, match=r"Ranks \(0,\) and \(1,\) communicate differently"):
        verify(lower(builder.plan(x), passes=(silence,)))


def test_verify_finds_a_wrong_shape() -> None:
    builder = PlanBuilder(mesh_of(m=2))
    x = builder.input("x", (4, 6), P("m"))
    wrong = builder.call(aten.sum.dim_IntList, (x, [0]), [((4,), P("m"))])
    with pytest.raises(PlanError, match=r"sum.*produces f32\[6\], but the program says f32\[2\]"):
        verify(lower(builder.plan(wrong)))


def test_passes_leave_operations_with_effects_alone() -> None:
    """Unused or equal collectives and random operators run as the plan says; all else that is unused goes."""
    builder = PlanBuilder(mesh_of(m=2))
    x = builder.input("x", (4,), P("m"))
    builder.call(aten.sin.default, (x,), [((4,), P("m"))])
    for _ in range(2):
        builder.move(x, P())
        builder.call(aten.rand.default, ([4],), [((4,), P())])
    emitted = lower(builder.plan(x), passes=()).graph()
    graph = emitted
    for run_pass in PASSES:
        graph = run_pass(graph)
    assert ["sin", "all_gather", "rand", "all_gather", "rand"] == [operation.name for operation in emitted.operations]
    assert ["all_gather", "rand", "all_gather", "rand"] == [operation.name for operation in graph.operations]


def test_a_program_as_a_module_of_fx() -> None:
    """Without communication, a rank's module computes the rank's shard, compiled or not."""
    builder = PlanBuilder(mesh_of(m=2))
    x = builder.input("x", (4, 3), P("m"))
    table = builder.constant(torch.arange(3.0))
    left, _, right = builder.call(aten.split.Tensor, (x, 1, 1), [((4, 1), P("m"))] * 3)
    total = builder.call(
        aten.add.Tensor, (builder.call(aten.mul.Tensor, (left, table), [((4, 3), P("m"))]), right), [((4, 3), P("m"))]
    )
    module = lowered(builder.plan(total)).graph_module((1,))
    shard = normal(4, 3)[2:]
    expected = shard[:, :1] * torch.arange(3.0) + shard[:, 2:]
    assert torch.equal(module(shard)[0], expected)
    assert torch.equal(torch.compile(module, backend="eager")(shard)[0], expected)
