"""The choice of the sizes of buckets and of the window."""

import attrs
import pytest
import torch
from memory_cases import step as step_of_layers
from sampling import sample

import gpt
import layouts
import spmd
from comms import workload_batch
from spmd import Machine, P
from spmd.inspect import Plan
from spmd.ir.launch_schedule import LaunchSchedule
from spmd.ir.markers import REDISTRIBUTE
from spmd.plan.cost.account import launched
from spmd.plan.machine.link import Link
from spmd.plan.schedule.choice import NEAR, best_schedule
from spmd.plan.search.options import SearchOptions
from spmd.plan.search.orders import plan as search
from training import Training, init

MACHINE = Machine(flops=2e10, memory_bandwidth=1e10, link_bandwidth=5e7, latency=1e-5)


def data_parallel(machine: Machine, runtime: str = "abstract") -> spmd.inspect.Plan:
    """64 layers, whose gradients are summed while earlier layers are differentiated."""
    mesh = spmd.make_mesh({"data": 4}, runtime=runtime)
    step = spmd.jit(step_of_layers, (P(), P("data")), P(), mesh=mesh, machine=machine)
    return step.plan([torch.empty(128, 128, device="meta")] * 64, torch.empty(4096, 128, device="meta"))


def launches(plan: spmd.inspect.Plan) -> int:
    return len({comm.launch for comm in plan.comms})


def with_largest_buckets(plan: spmd.inspect.Plan) -> spmd.inspect.Plan:
    return launched(plan, plan.request.machine.launch_schedule)


def test_buckets_are_smaller_where_communication_can_pass_beside_computation():
    plan = data_parallel(MACHINE)
    assert plan.schedule is not None and plan.schedule.bucket_bytes < MACHINE.bucket_bytes
    assert plan.timing.step < with_largest_buckets(plan).timing.step


def test_sums_of_scaled_gradients_pass_beside_the_backward_pass():
    """`weight - 0.1 * gradient` scales what each rank has before the sum."""
    plan = data_parallel(MACHINE)
    assert {comm.kind for comm in plan.comms} == {"all_reduce"}
    sent = {operation.operands[0] for operation in plan.graph.operations if operation.op is REDISTRIBUTE}
    assert {operation.op for operation in plan.graph.operations if not sent.isdisjoint(operation.tensors)} == {
        torch.ops.aten.mul.Tensor
    }
    assert plan.timing.exposed < 0.1 * plan.timing.communication


def test_buckets_are_the_largest_where_launches_take_longer_than_computation():
    machine = attrs.evolve(MACHINE, flops=1e14, memory_bandwidth=1e14, latency=1e-2)
    assert data_parallel(machine).schedule == machine.launch_schedule


def test_a_plan_in_fewer_launches_is_taken_where_it_is_as_fast():
    """As on four gloo processes, where a launch takes milliseconds until ranks have had their turns."""
    links = {
        "all_gather": (2e-3, 6.6e8),
        "all_reduce": (4.7e-3, 1e9),
        "all_to_all": (1.4e-3, 9e8),
        "permute": (8.5e-4, 1.1e9),
        "reduce_scatter": (1.4e-3, 7.5e8),
    }
    machine = Machine(
        flops=7.5e10,
        memory_bandwidth=8.6e9,
        link_bandwidth=6.6e8,
        latency=6.4e-4,
        operator_latency=6.5e-6,
        transcendental_seconds=2.9e-9,
        overlap=0.0,
        memory_overlap=0.0,
        write_allocate=True,
        fuses=False,
        links=[Link("data", kind, 6.4e-4, bandwidth, wait) for kind, (wait, bandwidth) in links.items()],
    )
    config, mesh = gpt.Config(vocab=256, width=512), spmd.make_mesh({"data": 4}, runtime="abstract")
    training = Training(config, layouts.STRATEGIES["fsdp"], mesh)
    state, batch = init(config, training.optimizer), workload_batch(config, 4)
    found = training.step(donate_argnums=0, machine=machine).plan(state, batch)
    first = search(found.request, SearchOptions(fewer_launches=False))
    assert launches(found) <= 24 < launches(first)
    assert found.timing.step <= NEAR * Plan.of(first).timing.step
    assert first.gap == 0 and found.gap == pytest.approx(found.seconds / first.seconds - 1)


def test_virtual_ranks_have_the_largest_buckets():
    assert data_parallel(MACHINE, "virtual").schedule == MACHINE.launch_schedule


def test_the_schedule_has_the_fewest_launches_of_those_with_nearly_the_least_step():
    plan = data_parallel(MACHINE)
    sizes = [MACHINE.bucket_bytes / parts for parts in (1, 2, 4, 8, 16)]
    others = [launched(plan, LaunchSchedule(size, size)) for size in sizes]
    least = min(other.timing.step for other in others)
    fast = [other for other in others if other.timing.step <= NEAR * least]
    assert plan.timing.step <= NEAR * least
    assert launches(plan) == min(map(launches, fast))
    assert 1 < len(fast) < len(others)
    assert {best_schedule(other).schedule for other in others} == {plan.schedule}


GLOO = Machine(
    flops=4.8e10,
    memory_bandwidth=1e10,
    link_bandwidth=6.2e8,
    latency=5.2e-3,
    operator_latency=3.2e-6,
    overlap=0.3,
    links=tuple(
        Link(axis, kind, latency, bandwidth)
        for axis in ("data", "model")
        for kind, latency, bandwidth in (
            ("all_gather", 2.1e-3, 6.2e8),
            ("all_reduce", 3.4e-3, 1.1e9),
            ("all_to_all", 1e-3, 7.4e8),
            ("reduce_scatter", 5.2e-3, 8.2e8),
        )
    ),
    fuses=False,
)
"""What four processes on two cores measure."""


@pytest.mark.parametrize("launched_at_most", sample([("dp", 4), ("fsdp", 22), ("tp", 21)], [("fsdp", 22)]))
def test_launches_of_a_training_step(launched_at_most: tuple[str, int]) -> None:
    """Of 51 MB of gradients, or two of each layer and direction and those of parameters, inputs and losses."""
    strategy, most = launched_at_most
    chosen = layouts.STRATEGIES[strategy]
    config = gpt.Config(vocab=256, width=512)
    training = Training(config, chosen, spmd.make_mesh(chosen.mesh_of(4), runtime="abstract"))
    plan = training.step(machine=GLOO).plan(init(config, training.optimizer), workload_batch(config, 8))
    assert launches(plan) <= most < len(plan.comms)


def test_a_sum_that_only_a_result_depends_on_is_sent_with_others():
    """The loss is divided by its count at the end of the program."""

    def step(weights, x, counts):
        gradients, total = torch.func.grad_and_value(lambda weights: (x @ weights).square().sum())(weights)
        return weights - gradients, total.exp()

    mesh = spmd.make_mesh({"data": 4}, runtime="abstract")
    jitted = spmd.jit(step, (P(), P("data"), P()), P(), mesh=mesh, machine=MACHINE)
    plan = jitted.plan(*(torch.empty(size, device="meta") for size in ((64, 64), (4096, 64), ())))
    assert [comm.kind for comm in plan.comms] == ["all_reduce"] * 2
    assert launches(plan) == 1
    assert plan.graph.operations[-1].op is torch.ops.aten.exp.default


def test_waiting_for_other_ranks_passes_beside_computation():
    """A wait costs nothing where its result is needed later, and a launch its latency."""

    def with_links(latency: float, wait: float) -> Machine:
        kinds = ("all_reduce", "all_gather", "reduce_scatter")
        return attrs.evolve(MACHINE, links=[Link("data", kind, latency, 5e7, wait) for kind in kinds], overlap=0.0)

    early, late, waiting = (data_parallel(with_links(*seconds)) for seconds in ((0.0, 0.0), (1e-2, 0.0), (0.0, 1e-2)))
    schedule = LaunchSchedule(2.0**18, 2.0**18)
    steps = [launched(plan, schedule).timing.step for plan in (early, late, waiting)]
    assert steps[0] < steps[2] < steps[0] + 1.5e-2
    assert steps[0] + 0.1 < steps[1]


def test_a_collective_is_launched_after_the_one_whose_result_it_sends():
    """Of the three collectives of one reshard, the first is in a bucket with one of a later operation."""
    mesh = spmd.make_mesh({"data": 2, "model": 4}, runtime="abstract")
    summed, rows = P("model", partial={"data": "sum"}), torch.empty(8, 128, device="meta")
    in_specs, out_specs = (P("model"), summed, summed), (P(), P("data"), P(("model", "data")))
    jitted = spmd.jit(lambda x, y, z: (x * 2, y, z), in_specs, out_specs, mesh=mesh, reduce_dtype=torch.float64)
    plan = with_largest_buckets(jitted.plan(rows, torch.empty(2048, 128, device="meta"), rows))
    _, first, second, third, other = plan.comms
    assert ["reduce_scatter", "permute", "all_gather"] == [first.kind, second.kind, third.kind]
    assert first.launch == other.launch < second.launch < third.launch


def test_a_list_operator_begins_when_all_its_operands_are_there() -> None:
    """One of its results is sent while another of its operands is on the way, were its elements calls of their own."""

    def scale(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = torch._foreach_mul(xs, [ys[0], spmd.reshard(ys[1], P("x"))])
        return spmd.reshard(first, P(None, "x")), second

    mesh = spmd.make_mesh({"x": 2})
    specs = (P("x"), [P("x"), P(None, "x")])
    plan = spmd.jit(scale, specs, (P(None, "x"), P("x")), mesh=mesh).plan(
        [torch.ones(4, 4)] * 2, [torch.ones(4, 4)] * 2
    )
    assert [comm.launch for comm in plan.comms] == [0, 1]
    assert plan.timing.step > 0
