"""Values that wait alike share the latency of a launch in the prices of plans."""

import pytest
import torch
from memory_cases import step as step_of_layers

import spmd
from spmd import Machine, P
from spmd.plan.data.dataflow import latency_shares

WIDTH = 16
SLOW_LAUNCHES = Machine(flops=1e11, memory_bandwidth=1e10, link_bandwidth=1e9, latency=1e-3)
"""One on which a launch takes as long as a megabyte."""


def plan_of(layers: int, width: int = WIDTH, rows: int = 64, machine: Machine | None = None) -> spmd.inspect.Plan:
    mesh = spmd.make_mesh({"data": 4}, runtime="abstract")
    step = spmd.jit(step_of_layers, (P(), P("data")), P(), mesh=mesh, machine=machine)
    return step.plan([torch.empty(width, width, device="meta")] * layers, torch.empty(rows, width, device="meta"))


def test_the_shares_of_parameters_gradients_and_results_add_up_to_a_launch_each():
    graph = plan_of(8).request.graph
    shares = latency_shares(graph, 1e9)
    gradients = [value for value in shares if value.name.startswith("mm") and value not in graph.inputs]
    for waiting in (graph.inputs, gradients, graph.outputs):
        assert sum(shares[value] for value in waiting) == pytest.approx(1.0)
    assert len(gradients) == 8


def test_large_values_fill_several_buckets():
    graph = plan_of(8).request.graph
    nbytes = 4 * WIDTH * WIDTH
    assert {latency_shares(graph, 2 * nbytes)[value] for value in graph.outputs} == {0.5}
    assert {latency_shares(graph, nbytes / 2)[value] for value in graph.outputs} == {1.0}


def test_few_values_pay_for_their_own_launches():
    assert latency_shares(plan_of(4).request.graph, 1e9) == {}


def test_values_of_another_dtype_pay_for_their_own_launches():
    mesh = spmd.make_mesh({"data": 4}, runtime="abstract")
    weights = [torch.empty(WIDTH, WIDTH, device="meta")] * 8
    rows = torch.empty(64, dtype=torch.int64, device="meta")
    step = spmd.jit(lambda ws, rows: [w[rows].sum() for w in ws], (P(), P("data")), P(), mesh=mesh)
    graph = step.plan(weights, rows).request.graph
    shares = latency_shares(graph, 1e9)
    assert [value.meta.dtype is torch.float32 for value in graph.inputs] == [value in shares for value in graph.inputs]


def test_views_and_redistributions_share_as_what_they_are_made_from():
    plan = plan_of(8)
    shares = latency_shares(plan.graph, 1e9)
    reduced = {o.tensors[0]: o.operands[0] for o in plan.graph.operations if str(o.op) == "spmd.redistribute.default"}
    assert reduced
    assert all(shares.get(value) == shares.get(origin) for value, origin in reduced.items())


def test_data_parallelism_is_found_where_a_launch_for_each_gradient_is_too_slow():
    """64 latencies would take longer than the products of all ranks' rows; a few launches do not."""
    plan = plan_of(64, width=128, rows=512, machine=SLOW_LAUNCHES)
    reduces = [comm for comm in plan.comms if comm.kind == "all_reduce" and comm.bytes > 1000]
    assert len(reduces) == 64
    assert len({comm.launch for comm in reduces}) < 8
    assert sum(comm.seconds for comm in reduces) < 64 * SLOW_LAUNCHES.latency / 4


def test_the_count_of_a_mean_of_losses_is_known_before_the_scores():
    """Nothing but the targets is read for it, so it is no launch between the forward and the backward pass."""
    mesh = spmd.make_mesh({"data": 4}, runtime="abstract")

    def gradient(x, targets):
        return torch.func.grad(lambda x: torch.nn.functional.cross_entropy(x, targets))(x)

    step = spmd.jit(gradient, (P("data"), P("data")), P("data"), mesh=mesh, machine=SLOW_LAUNCHES)
    plan = step.plan(torch.empty(64, 8, device="meta"), torch.empty(64, dtype=torch.int64, device="meta"))
    (sent,) = [o for o in plan.graph.operations if str(o.op) == "spmd.redistribute.default"]
    made = {value: operation for operation in plan.graph.operations for value in operation.tensors}
    needs, todo = set(), [sent.operands[0]]
    while todo:
        value = todo.pop()
        needs.add(value)
        todo += made[value].operands if value in made else ()
    assert plan.graph.inputs[0] not in needs
    assert plan.graph.inputs[1] in needs
