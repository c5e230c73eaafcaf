"""What the operations and values of a rank's program stand for in the plan."""

from __future__ import annotations

import torch

import spmd
from spmd import P
from spmd.core.spec import TensorMeta
from spmd.ir.comm import Comm
from spmd.ir.graph import Annotations, Graph, Operation, Value
from spmd.ir.markers import REDISTRIBUTE
from spmd.lowering.launches import Start, Wait, split_launches
from spmd.lowering.lower import rank_graph
from spmd.plan.memory.liveness import liveness_of

HOST_PRINT = torch.ops.spmd.host_print.default


def plan_of(rows: int = 6) -> spmd.inspect.Plan:
    def step(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def loss(weight: torch.Tensor) -> torch.Tensor:
            return torch.log_softmax(x @ weight.clone(), 1).square().mean()

        gradient = torch.func.grad(loss)(weight)
        return weight - gradient, gradient[:2], torch.full((8,), 2.0)

    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    jitted = spmd.jit(step, (P("x"), P("x")), (P("x"), P(), P("x")), mesh=mesh)
    return jitted.plan(torch.rand(4, 6), torch.rand(rows, 4))


def test_every_operation_runs_for_one_of_the_plan() -> None:
    for rows in (6, 5):
        plan = plan_of(rows)
        for coordinate in plan.mesh.coordinates():
            graph = rank_graph(plan, coordinate)
            origins = {operation.annotations.origin for operation in graph.operations}
            assert origins <= {*plan.graph.operations}
            collectives = [o for o in graph.operations if o.annotations.comm]
            assert len(collectives) == len(plan.comms)
            for operation, comm in zip(collectives, plan.comms, strict=True):
                origin = operation.annotations.origin
                assert origin is not None
                assert origin.op is not REDISTRIBUTE or plan.causes[origin].text == comm.cause


def test_the_local_tensor_of_a_planned_value_has_its_local_shape() -> None:
    plan = plan_of(5)
    for coordinate in plan.mesh.coordinates():
        graph = rank_graph(plan, coordinate)
        there = {*graph.inputs, *(value for operation in graph.operations for value in operation.tensors)}
        for value, local in graph.planned.items():
            assert local not in there or local.meta.shape == plan.layout(value).shape(coordinate), value
        held = [graph.planned[value] for value in plan.graph.outputs]
        assert there.issuperset(held)


def test_every_planned_value_has_a_buffer_with_its_name() -> None:
    plan = plan_of()
    liveness = liveness_of(plan)
    assert all(value in liveness.buffers for operation in plan.graph.operations for value in operation.tensors)
    named = {buffer.value.name for event in liveness.events for buffer in event.writes if buffer.value}
    assert {"log_softmax", "mm", "mm_1_reduced"} <= named


def test_a_launch_leaves_operations_without_results_where_they_stand() -> None:
    """Once each, between a start and its wait."""
    x, sent, used = (Value(name, TensorMeta((4,), torch.float32)) for name in "xyz")
    note = Annotations(Comm("all_reduce", ("x",), 16.0, 0.0, "", None))
    prints = [Operation(HOST_PRINT, ([x], [name]), {}, ()) for name in ("a", "b")]
    reduce = Operation(torch.ops.spmd.all_reduce.default, (x, "sum", ["x"]), {}, (sent,), annotations=note)
    use = Operation(torch.ops.aten.neg.default, (sent,), {}, (used,))
    split = split_launches(Graph((x,), (), (reduce, *prints, use), (used,)), 0.0).operations
    assert [type(operation.op) for operation in split[:1]] == [Start]
    assert [operation for operation in split if operation.op is HOST_PRINT] == prints
    assert [type(operation.op) for operation in split].count(Wait) == 1
    assert split[-1] is use
