"""What plans of one program share: never what belongs to another program, to other specs or to another schedule."""

import gc
import weakref

import attrs
import torch

import spmd
from spmd import P
from spmd.lowering.launches import with_records
from spmd.lowering.lower import build_rank_graph, lower, rank_graph
from spmd.plan.cost.account import account, launched
from spmd.plan.data.of_program import of_program

ZERO = (0, 0)


def layers(xs: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        xs = torch.relu(xs @ weight)
    return xs.sum(0)


def planned(axis: str = "data") -> spmd.inspect.Plan:
    mesh = spmd.make_mesh({"data": 2, "model": 3}, runtime="abstract")
    step = spmd.jit(layers, (P(axis), P(None, "model")), P(), mesh=mesh)
    return step.plan(torch.empty(8, 7, device="meta"), [torch.empty(7, 7, device="meta")] * 3)


def test_a_lowered_plan_has_the_program_and_the_launches_of_its_own_schedule():
    plan = planned()
    for changed in (plan, launched(plan, None), launched(plan, plan.request.machine.launch_schedule)):
        graph = lower(changed).graph()
        expected = with_records(build_rank_graph(changed, ZERO), changed.comms)
        assert str(expected) == str(graph)
        assert [o.annotations for o in expected.operations] == [o.annotations for o in graph.operations]
        assert changed.comms == account(changed).all_comms
    assert len({comm.launch for comm in launched(plan, None).comms}) == len(plan.comms)
    assert rank_graph(plan, ZERO) is rank_graph(launched(plan, None), ZERO)
    assert rank_graph(plan, ZERO) is not rank_graph(plan, (1, 2))


def test_a_plan_with_other_specs_for_the_same_graph_has_its_own_program():
    plan, other = planned(), planned("model")
    values = dict(zip(other.graph.inputs, plan.graph.inputs, strict=True))
    specs = plan.specs | {values[value]: other.specs[value] for value in values}
    before = rank_graph(plan, ZERO)
    changed = rank_graph(attrs.evolve(plan, specs=specs), ZERO)
    assert [(4, 7), (3, 7)] == [graph.inputs[0].meta.shape for graph in (before, changed)]
    assert (4, 7) == rank_graph(plan, ZERO).inputs[0].meta.shape


def test_results_live_as_long_as_the_graph():
    class Result:
        pass

    made = []

    @of_program
    def result(plan: spmd.inspect.Plan, number: int) -> Result:
        made.append(number)
        return Result()

    plan = attrs.evolve(planned(), graph=attrs.evolve(planned().graph))
    first = weakref.ref(result(plan, 1))
    assert result(attrs.evolve(plan, schedule=None), 1) is first()
    assert result(plan, 2) is not first()
    assert made == [1, 2]
    del plan
    gc.collect()
    assert first() is None
