"""Machines: what their constants mean, where the named ones come from, and that measuring finds plausible ones."""

import json
import math
from pathlib import Path

import attrs
import machine_cases
import pytest
import torch
from sampling import sample
from torch.nn import functional as F
from workers import Workers, call_on_mesh

import spmd
from spmd import Machine, P, PlanError, TensorMeta
from spmd.collectives.traffic import record_traffic
from spmd.plan.machine import default, measure
from spmd.plan.machine.link import Link
from spmd.plan.machine.machine import PRESETS, TF32_FLOPS

KIND = "all_reduce"
DOCS = Path(__file__).parents[2] / "docs" / "planning.md"
COLUMNS = ("name", "float64", "float32", "TF32", "bfloat16", "float8", "memory", "bandwidth", "link", "latency")


def table_of_presets():
    """The markdown table: Tflop/s by dtype, GB, GB/s between memory and processor, GB/s sent, microseconds."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for name, machine in PRESETS.items():
        rates = {**dict(machine.dtype_flops), "tf32": TF32_FLOPS.get(name, 0)}
        dtypes = ("float64", "float32", "tf32", "bfloat16", "float8_e4m3fn")
        cells = [f"{rates[dtype] / 1e12:.4g}" if rates.get(dtype) else "-" for dtype in dtypes]
        sizes = (machine.memory_capacity, machine.memory_bandwidth, machine.link_bandwidth)
        rows.append((f"`{name}`", *cells, *(f"{size / 1e9:.4g}" for size in sizes), f"{machine.latency * 1e6:g}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_documented_table_is_the_presets():
    assert table_of_presets() in DOCS.read_text()


def test_the_default_is_that_of_the_study():
    expected = (5e14, 3e12, 4e11, (), 0.5e-6, (), (), None, 0.0, 0.0, 1.0, 1.0, (), False, True, "")
    assert expected == attrs.astuple(Machine())
    assert 5e14 == Machine().rate(torch.bfloat16) == Machine().rate(torch.float64)


def test_an_operator_takes_the_longer_of_arithmetic_and_traffic():
    machine = Machine(flops=10.0, memory_bandwidth=4.0, dtype_flops={torch.bfloat16: 40.0, "float32": 20.0})
    assert 100 / 10 == machine.compute_seconds(100, 1) == machine.compute_seconds(100, 1, torch.float64)
    assert 100 / 20 == machine.compute_seconds(100, 1, torch.float32) == machine.compute_seconds(100, 1, torch.cfloat)
    assert 100 / 40 == machine.compute_seconds(100, 1, torch.bfloat16)
    assert 400 / 4 == machine.compute_seconds(100, 400, torch.bfloat16)


def test_memory_traffic_that_does_not_overlap_adds_to_arithmetic():
    machine = Machine(flops=10.0, memory_bandwidth=4.0, memory_overlap=0.25)
    assert 100 / 10 + 0.75 * 8 / 4 == machine.compute_seconds(100, 8)
    assert 400 / 4 + 0.75 * 100 / 10 == machine.compute_seconds(100, 400)


def test_transcendental_functions_count_as_arithmetic():
    machine = Machine(flops=10.0, memory_bandwidth=4.0, memory_overlap=0.25, transcendental_seconds=2.0)
    assert 100 / 10 + 3 * 2.0 + 0.75 * 8 / 4 == machine.compute_seconds(100, 8, evaluations=3)


def test_a_collective_takes_the_time_of_its_slowest_links():
    machine = Machine(link_bandwidth=100.0, latency=1.0, axis_bandwidth={"far": 10.0}, axis_latency={"far": 5.0})
    assert 1 + 200 / 100 == machine.collective_seconds(KIND, ("near",), 200)
    assert (
        5 + 200 / 10
        == machine.collective_seconds(KIND, ("far",), 200)
        == machine.collective_seconds(KIND, ("near", "far"), 200)
    )
    links = [Link(axis, KIND, latency, 50.0) for axis, latency in {"near": 0.5, "far": 2.0}.items()]
    measured = attrs.evolve(machine, links=links)
    assert 2.5 + 200 / 50 == measured.collective_seconds(KIND, ("near", "far"), 200)
    assert 2 + 200 / 50 == measured.collective_seconds(KIND, ("far",), 200)
    assert 0.5 + 200 / 100 == Machine(100, 1, 100, latency=1, axis_latency={"a": 0.5}).collective_seconds(
        KIND, ("a",), 200
    )


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"flops": 0}, r"Machine flops must be positive \(got 0\)"),
        ({"memory_bandwidth": math.nan}, "memory_bandwidth must be positive"),
        ({"axis_bandwidth": {"data": -1.0}}, r"axis_bandwidth\['data'\] must be positive"),
        ({"axis_latency": {"data": -1.0}}, r"axis_latency\['data'\] must not be negative"),
        ({"dtype_flops": {"bfloat16": 0}}, r"dtype_flops\['bfloat16'\] must be positive"),
        ({"dtype_flops": {"bf16": 1.0}}, r"must name dtypes of torch, as 'bfloat16' \(got 'bf16'\)"),
        ({"memory_capacity": -1}, "memory_capacity must be positive"),
        ({"latency": -1}, "latency must not be negative"),
        ({"operator_latency": -1}, "operator_latency must not be negative"),
        ({"transcendental_seconds": -1}, "transcendental_seconds must not be negative"),
        ({"overlap": 1.5}, r"overlap must be in 0\.\.1 \(got 1\.5\)"),
        ({"overlap": math.nan}, "overlap must be in"),
        ({"memory_overlap": -0.5}, r"memory_overlap must be in 0\.\.1 \(got -0\.5\)"),
    ],
)
def test_impossible_constants_are_refused(constants, message):
    with pytest.raises(PlanError, match=message):
        Machine(**constants)


def test_a_machine_serves_meshes_that_lack_some_of_its_axes():
    def seconds(machine):
        mesh = spmd.make_mesh({"data": 2}, runtime="abstract")
        return spmd.jit(torch.sin, P("data"), P(), mesh=mesh, machine=machine).plan(torch.empty(4)).seconds

    data, both = {"data": 1e3}, {"data": 1e3, "model": 1e2}
    assert seconds(Machine()) < seconds(Machine(axis_bandwidth=data)) == seconds(Machine(axis_bandwidth=both))


def test_a_kind_of_collective_has_constants_of_its_own():
    far = Link("data", "all_gather", latency=3.0, bandwidth=50.0)
    machine = Machine(link_bandwidth=100.0, latency=1.0, axis_latency={"model": 2.0}, links=[far])
    assert 3 + 200 / 50 == machine.collective_seconds("all_gather", ("data",), 200)
    assert 3 + 200 / 50 == machine.collective_seconds("all_gather", ("data", "model"), 200)
    assert 2 + 200 / 100 == machine.collective_seconds("all_reduce", ("data", "model"), 200)
    waits = Machine(
        links=[Link(axis, "all_gather", 1.0, 50.0, wait) for axis, wait in {"data": 2.0, "model": 4.0}.items()]
    )
    assert 1 + 1 + 2 + 4 + 200 / 50 == waits.collective_seconds("all_gather", ("data", "model"), 200)
    assert 1 + 1 + 200 / 50 == waits.sending_seconds("all_gather", ("data", "model"), 200)
    assert 2 + 4 == waits.wait_seconds("all_gather", ("data", "model"))
    assert 0 == waits.wait_seconds("all_reduce", ("data", "model"))
    negative = [("data", "all_reduce", -1.0, 1.0), ("data", "all_reduce", 0.0, 1.0, -1.0)]
    for wrong in (("data", "shard", 0.0, 1.0), ("data", "all_reduce", 0.0, 0.0), *negative):
        with pytest.raises(PlanError, match="of a link must"):
            Link(*wrong)


def test_every_operator_but_views_has_a_latency():
    def seconds(latency):
        mesh = spmd.make_mesh({"data": 2}, runtime="abstract")
        step = spmd.jit(lambda x: x.t().sin().cos(), P("data"), mesh=mesh, machine=Machine(operator_latency=latency))
        return step.plan(torch.empty(4, 4)).seconds

    assert 2 * 3.0 == pytest.approx(seconds(3.0) - seconds(0.0))


def seconds_on_shards(function, shape, machine):
    """The predicted time of a function whose argument and result are sharded over two ranks."""
    mesh = spmd.make_mesh({"data": 2}, runtime="abstract")
    return spmd.jit(function, P("data"), P("data"), mesh=mesh, machine=machine).plan(torch.empty(shape)).seconds


@pytest.mark.parametrize(
    ("function", "each"),
    [
        (lambda x: F.gelu(x, approximate="tanh"), 1.0),
        (F.gelu, 0.25),
        (torch.tanh, 0.0),
        (lambda x: torch.softmax(x, -1), 0.25),
        (lambda x: F.gelu(F.gelu(x), approximate="tanh"), 1.25),
    ],
)
def test_each_rank_evaluates_the_transcendental_functions_of_its_elements(function, each):
    slow, free = (seconds_on_shards(function, (6, 4), Machine(transcendental_seconds=s)) for s in (1.0, 0.0))
    assert 3 * 4 * each == pytest.approx(slow - free)


def test_a_view_that_copies_counts_as_what_it_reads_and_writes():
    machine = Machine(memory_bandwidth=1.0, fuses=False)
    # A shard has 32 elements of 4 bytes, which are read and written.
    copies = seconds_on_shards(lambda x: x.transpose(1, 2).reshape(-1, 8), (8, 2, 4), machine)
    assert 2 * 4 * 32 == copies
    assert 0 == seconds_on_shards(lambda x: x.transpose(1, 2).unsqueeze(1), (8, 2, 4), machine)


def test_values_between_pointwise_operators_count_where_nothing_is_fused():
    def seconds(fuses):
        mesh = spmd.make_mesh({"data": 2}, runtime="abstract")
        machine = Machine(memory_bandwidth=1.0, fuses=fuses)
        return spmd.jit(lambda x: x.sin().cos(), P("data"), P("data"), mesh=mesh, machine=machine).plan(x).seconds

    x = torch.empty(8)
    assert (2 * 16, 4 * 16) == (seconds(True), seconds(False))


def test_new_results_pass_twice_where_writes_allocate_but_not_what_an_optimizer_updates():
    machine = Machine(memory_bandwidth=1.0, fuses=False)
    allocates = attrs.evolve(machine, write_allocate=True)

    optimizer, mesh = spmd.optim.sgd(0.1, momentum=0.9), spmd.make_mesh({"data": 2}, runtime="abstract")
    params = [torch.empty(8)]
    args = params, optimizer.init(params), params

    def seconds_of_update(found):
        return spmd.jit(optimizer.step, P("data"), P("data"), mesh=mesh, machine=found).plan(*args).seconds

    assert (2 * 16, 3 * 16) == tuple(seconds_on_shards(torch.sin, (8,), found) for found in (machine, allocates))
    assert seconds_of_update(machine) == seconds_of_update(allocates) >= 5 * 16


def test_unknown_presets_are_refused():
    with pytest.raises(PlanError, match=r"Unknown machine 'h100'\. Expected one of h100_nvlink, h200, a100"):
        Machine.preset("h100")
    with pytest.raises(PlanError, match="Machine 'cpu' has no TF32 units; h100_nvlink, h200, a100 have"):
        Machine.preset("cpu", tf32=True)


def test_presets_take_changes():
    machine = Machine.preset("h100_nvlink", axis_bandwidth={"data": 5e10}, axis_latency={"data": 5e-6})
    assert (5e10, 450e9) == (dict(machine.axis_bandwidth)["data"], machine.link_bandwidth)
    tf32 = Machine.preset("a100", tf32=True)
    assert (156e12, 312e12) == (tf32.rate(torch.float32), tf32.rate(torch.bfloat16))
    assert tf32.rate(torch.float64) == Machine.preset("a100").rate(torch.float64) == 19.5e12


@pytest.mark.parametrize("name", PRESETS)
def test_narrower_numbers_are_not_slower(name):
    machine = PRESETS[name]
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    assert sorted(map(machine.rate, dtypes)) == list(map(machine.rate, dtypes))
    assert machine.rate(torch.float64) > machine.memory_bandwidth > machine.link_bandwidth


def test_machines_are_values_that_json_can_hold():
    for machine in (Machine(), Machine(links=[Link("data", "permute", 0.0, 1.0)]), *PRESETS.values()):
        assert machine == Machine(**json.loads(json.dumps(attrs.asdict(machine))))
        assert machine in {machine}


def seconds_of_product(machine, dtype):
    """Predicted seconds of one large product."""
    x = TensorMeta((4096, 4096), dtype)
    mesh = spmd.make_mesh({"data": 8}, runtime="abstract")
    return spmd.jit(torch.mm, (P("data"), P()), P("data"), mesh=mesh, machine=machine).plan(x, x).seconds


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_plan_takes_the_rate_of_its_dtype(dtype):
    work, traffic = 2 * 4096**3 / 8, 4096 * (4096 + 2 * 512) * dtype.itemsize
    machine = Machine.preset("h100_nvlink")
    assert work / machine.rate(dtype) == pytest.approx(seconds_of_product(machine, dtype))
    assert max(work / 5e14, traffic / 3e12) == pytest.approx(seconds_of_product(Machine(), dtype))


@pytest.mark.parametrize("axes", [{"data": 2, "model": 4}, {"data": 1}])
def test_a_virtual_mesh_can_be_measured(axes):
    mesh = spmd.make_mesh(axes, runtime="virtual")
    machine = Machine.measure(mesh)
    names = {axis for axis, size in axes.items() if size > 1}
    assert names == set(dict(machine.axis_bandwidth)) == set(dict(machine.axis_latency))
    assert {"float64", "float32", "bfloat16"} <= set(dict(machine.dtype_flops))
    assert machine.memory_capacity is None or machine.memory_capacity > 2**20
    # What any computer of these years does, and none: far limits, since others may be at work on this one.
    assert all(1e5 < rate < 1e15 for _, rate in machine.dtype_flops)
    assert 1e6 < machine.memory_bandwidth < 1e14
    assert all(1e4 < rate < 1e14 for _, rate in machine.axis_bandwidth)
    assert all(0 <= time < 10 for _, time in machine.axis_latency)
    for axis in names:
        seconds = [machine.collective_seconds(KIND, (axis,), size) for size in (0, 2**10, 2**20)]
        assert seconds == sorted(set(seconds))
    assert 0 < seconds_of_product(machine, torch.float32) < math.inf


def test_a_bucket_saturates_the_link():
    machine = Machine(link_bandwidth=1e9, latency=2.5e-4)
    assert 20 * 2.5e-4 * 1e9 == machine.bucket_bytes
    waits = [Link("data", kind, 1e-4, 1e9, wait) for kind, wait in {"all_gather": 1e-4, "all_reduce": 2.5e-4}.items()]
    assert 20 * 5e-4 * 1e9 == attrs.evolve(machine, links=waits).bucket_bytes
    assert 2**20 == attrs.evolve(machine, latency=0.0).bucket_bytes
    assert 25 * 2**20 == attrs.evolve(machine, latency=1.0).bucket_bytes


def test_the_constants_of_a_link_are_those_of_its_times(monkeypatch):
    def seconds(run):
        with record_traffic() as traffic:
            run()
        return 3e-5 + traffic.sent() / 2e9

    monkeypatch.setattr(measure, "median_seconds", seconds)
    mesh = spmd.make_mesh({"data": 2, "model": 4}, runtime="virtual")
    for axis in mesh.names:
        link = measure.measure_link(mesh, axis)
        assert (2e9, 3e-5) == (pytest.approx(link.bandwidth), pytest.approx(link.latency))


def test_the_ranks_of_a_virtual_mesh_share_what_the_process_does(monkeypatch):
    monkeypatch.setattr(measure, "median_seconds", lambda run: run() is None or 0.5)
    alone, shared = (spmd.make_mesh({"data": size}, runtime="virtual") for size in (1, 4))
    assert 2 * 512**3 / 0.5 == measure.measure_products(alone)[torch.float32]
    assert {dtype: rate / 4 for dtype, rate in measure.measure_products(alone).items()} == measure.measure_products(
        shared
    )
    assert measure.measure_copies(alone) == 4 * measure.measure_copies(shared) == 2 * 2**27 / 0.5
    assert measure.memory_of(alone, 1) // 4 == measure.memory_of(shared, 4)


def test_a_disturbed_measurement_still_gives_a_machine(monkeypatch):
    times = iter([2.0, 1.0])
    monkeypatch.setattr(measure, "median_seconds", lambda run: next(times))
    link = measure.measure_link(spmd.make_mesh({"data": 2}, runtime="virtual"), "data")
    assert (2**25 / 2, 1.0) == (link.bandwidth, link.latency)


def test_a_mesh_that_does_not_run_cannot_be_measured():
    mesh = spmd.make_mesh({"data": 2}, runtime="abstract")
    with pytest.raises(spmd.MeshError, match="is abstract: nothing runs on it that could be measured"):
        Machine.measure(mesh)


@pytest.mark.parametrize("axes", sample([{"data": 1}, {"data": 2}, {"data": 2, "model": 2}], [{"data": 2, "model": 2}]))
def test_processes_can_be_measured(workers: Workers, axes):
    ranks = math.prod(axes.values())
    machine, *others = workers.run(call_on_mesh, Machine.measure, axes, "distributed", ranks=ranks)
    assert all(machine == other for other in others)
    assert machine == Machine(**json.loads(json.dumps(attrs.asdict(machine))))
    assert f"measured on {ranks} gloo process" in str(machine)
    assert {"float64", "float32", "bfloat16"} <= set(dict(machine.dtype_flops))
    assert 5 * sum(size > 1 for size in axes.values()) == len(machine.links)
    # What any computer of these years does: far limits, since others may be at work on this one.
    assert all(1e5 < rate < 1e15 for _, rate in machine.dtype_flops)
    assert 1e6 < machine.memory_bandwidth < 1e14
    assert 1e-8 < machine.operator_latency < 1
    assert 0 <= machine.transcendental_seconds < 1e-3
    assert machine.write_allocate
    assert all(1e4 < link.bandwidth < 1e14 for link in machine.links)
    assert all(0 <= seconds < 10 for link in machine.links for seconds in (link.latency, link.wait))
    for value in (machine.flops, machine.memory_bandwidth, *(link.bandwidth for link in machine.links)):
        assert value == float(f"{value:.1e}")


@pytest.mark.parametrize(
    "case",
    [
        machine_cases.ranks_measure_once,
        machine_cases.the_first_rank_measures_where_a_preset_has_links,
        machine_cases.one_rank_gives_a_machine,
        machine_cases.a_failing_rank,
    ],
)
def test_ranks_agree_on_a_machine(workers: Workers, tmp_path, case):
    workers.run(call_on_mesh, case, {"data": 2}, "distributed", str(tmp_path), ranks=2)


def test_gpus_have_presets_with_a_network_between_hosts(monkeypatch):
    mesh = attrs.evolve(spmd.make_mesh({"data": 2, "model": 4}, runtime="abstract"), device="cuda")
    for name, preset in (("NVIDIA H100 80GB HBM3", "h100_nvlink"), ("NVIDIA H200", "h200"), ("NVIDIA T4", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        near, far = (default._preset(mesh, hosts) for hosts in ((0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1)))
        if preset is None:
            assert near is far is None
            continue
        assert near == PRESETS[preset]
        assert far == Machine.preset(preset, axis_bandwidth={"data": 5e10}, axis_latency={"data": 5e-6})
        assert str(far).startswith(f"preset {preset}, data across hosts: 6.7e+04 Gflop/s")


def test_other_meshes_have_the_default_machine():
    for runtime in ("virtual", "abstract"):
        machine = default.default_machine(spmd.make_mesh({"data": 2}, runtime=runtime))
        assert machine == Machine()
        assert str(machine).startswith("default, like an H100 in one node: 5e+05 Gflop/s, memory 3 TB/s")


def test_a_saved_plan_brings_its_machine(tmp_path):
    x, mesh = torch.ones(4), spmd.make_mesh({"data": 2})
    slow = Machine(memory_bandwidth=1e3, links=[Link("data", "all_gather", 1.0, 1e3)], origin="a slow one")

    def jitted(**options):
        return spmd.jit(torch.sin, P("data"), P(), mesh=mesh, **options)

    plan = jitted(machine=slow).plan(x)
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json"):
        loaded = jitted(plan=given).plan(x)
        assert (slow, plan.seconds) == (loaded.request.machine, loaded.seconds)
        assert "a slow one" == loaded.request.machine.origin
        assert Machine() == jitted(plan=given, machine=Machine()).plan(x).request.machine
    assert plan._report.summary["machine"] == slow.origin
    path = tmp_path / "plan.json"
    path.write_text(path.read_text().replace('"overlap": 1.0', '"overlap": 2.0'))
    with pytest.raises(PlanError, match=r"The saved plan is damaged: Machine overlap must be in 0\.\.1"):
        jitted(plan=path).plan(x)
