"""Planning under a memory limit: what is given up for it in closed form, and values that stay right."""

import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import optree
import pytest
import torch
import torch.nn.functional as F
from interpreter import evaluate
from sampling import sample
from torch import Tensor

import gpt
import layouts
import spmd
from spmd import P, TensorMeta
from spmd.core.quantity import parse_bytes
from spmd.inspect import Plan
from spmd.lowering.verify import verify
from spmd.optim import AdamWState, Optimizer, adamw, sgd
from spmd.plan.memory.reorder import by_results
from spmd.plan.search import orders
from spmd.testing.live import peak_bytes
from spmd.testing.programs import agree
from spmd.tracing.canonicalize.canonicalize import canonicalize
from spmd.tracing.trace import trace
from training import Training, init, make_step

WIDTH, ROWS, RANKS = 4096, 65536, 8
PARAMETER = 4 * WIDTH * WIDTH * 4
HIDDEN = ROWS // RANKS * 4 * WIDTH * 4
"""Bytes of a layer's hidden activations on a rank."""

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)

Layers = list[tuple[Tensor, Tensor]]


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.float32)


def jitted(optimizer: Optimizer, params: P, state: Any, **options: Any) -> Any:
    def step(layers: Layers, state: Any, x: Tensor) -> Any:
        def loss(layers: Layers) -> Tensor:
            y = x
            for up, down in layers:
                y = y + F.linear(torch.relu(F.linear(y, up)), down)
            return y.square().sum()

        return optimizer.step(layers, state, torch.func.grad(loss)(layers))

    mesh = spmd.make_mesh({"data": RANKS}, runtime="abstract")
    return spmd.jit(step, (params, state, P("data")), (params, state), mesh=mesh, **options)


def plan_of(count: int, optimizer: Optimizer, params: P, state: Any, **options: Any) -> Plan:
    layers = [(meta(4 * WIDTH, WIDTH), meta(WIDTH, 4 * WIDTH))] * count
    begin = optimizer.init(optree.tree_map(lambda m: torch.empty(m.shape, device="meta"), layers))
    metas = optree.tree_map(TensorMeta.of, begin)
    return jitted(optimizer, params, state, **options).plan(layers, metas, meta(ROWS, WIDTH))


def fully_sharded(count: int, **options: Any) -> Plan:
    return plan_of(count, sgd(0.1), P("data"), P("data"), **options)


def counts(plan: Plan) -> dict[str, int]:
    return dict(Counter(comm.kind for comm in plan.comms))


def smallest_peak(plan_with: Any) -> int:
    """The peak that the refusal of an impossible limit names."""
    with pytest.raises(spmd.PlanError) as refused:
        plan_with(memory_limit=1)
    found = re.search(r"smallest peak found is ([\d,]+) bytes", str(refused.value))
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("layers", sample([1, 2, 8, 32], [1, 2]))  # 32 layers take a quarter of a minute
def test_fully_sharded_parameters_are_gathered_again_in_backward(layers: int) -> None:
    """All but two: the backward of the first layer does not need the weight that reads the data, and the last weight is
    still in use when backward begins."""
    free = fully_sharded(layers)
    assert counts(free) == {"all_gather": 2 * layers, "reduce_scatter": 2 * layers}
    assert free.memory.peak > 2 * (layers - 1) * PARAMETER  # all that are needed again are kept
    limit = smallest_peak(lambda **options: fully_sharded(layers, **options))
    tight = fully_sharded(layers, memory_limit=limit)
    assert counts(tight) == {"all_gather": 4 * layers - 2, "reduce_scatter": 2 * layers}
    assert tight.memory.peak == limit
    gathered = sum(comm.seconds for comm in tight.comms) - sum(comm.seconds for comm in free.comms)
    assert gathered == pytest.approx((2 * layers - 2) * free.comms[0].seconds)
    assert tight.seconds == pytest.approx(free.seconds + gathered)


@pytest.mark.parametrize(("layers", "given_up"), [(4, 2), *(SLOW(8, count) for count in (1, 2, 5))])
def test_a_limit_gives_up_no_more_than_it_must(layers: int, given_up: int) -> None:
    """Each gathered parameter less is a second gather more."""
    free = fully_sharded(layers)
    plan = fully_sharded(layers, memory_limit=free.memory.peak - given_up * PARAMETER)
    assert counts(plan)["all_gather"] <= 2 * layers + given_up
    assert plan.memory.peak <= free.memory.peak - given_up * PARAMETER


def test_a_limit_that_is_met_changes_nothing() -> None:
    free = fully_sharded(2)
    assert str(fully_sharded(2, memory_limit=free.memory.peak)) == str(free)
    assert str(fully_sharded(2, memory_limit="80GB")) == str(free)


@pytest.mark.parametrize("layers", sample([1, 2, 32], [1, 2]))
def test_sharded_optimizer_state_makes_zero_1(layers: int) -> None:
    state = AdamWState(P(), P("data"), P("data"))
    plan = plan_of(layers, adamw(), P(), state)
    assert counts(plan) == {"reduce_scatter": 2 * layers, "all_gather": 2 * layers}
    assert sum(comm.bytes for comm in plan.comms) == 2 * (RANKS - 1) / RANKS * 2 * layers * PARAMETER
    replicated = plan_of(layers, adamw(), P(), P()).memory.peak
    assert replicated - plan.memory.peak >= 2 * 2 * layers * PARAMETER * (RANKS - 1) // RANKS


@pytest.mark.parametrize("layers", sample([3, 8, 32], [3]))
def test_updates_run_one_after_the_other_under_a_limit(layers: int) -> None:
    """A fused Adam for all parameters needs all gradients at once."""

    def plan(**options: Any) -> Plan:
        state = AdamWState(P(), P("data"), P("data"))
        return plan_of(layers, adamw(), P("data"), state, donate_argnums=(0, 1), **options)

    free = plan()
    shard = PARAMETER // RANKS
    assert free.memory.peak > layers * HIDDEN
    tight = plan(memory_limit=smallest_peak(plan))
    updates = [operation for operation in tight.graph.operations if operation.name == "_fused_adam"]
    assert [None] * 2 * layers == [operation.group for operation in updates]
    end = tight.memory.timeline[-1]
    assert end <= 2 * layers * 3 * shard + HIDDEN


def test_an_impossible_limit_says_what_is_held() -> None:
    message = (
        r"at most memory_limit=1,000,000,000 bytes per rank: the smallest peak found is [\d,]+ bytes, at "
        r"threshold_backward at test_memory_limit.py:\d+ \(backward\). Held there:\n"
        r" +536,870,912  temporary  relu f32\[8192,16384\] by relu at test_memory_limit.py:\d+\n"
    )
    with pytest.raises(spmd.PlanError, match=message):
        fully_sharded(2, memory_limit="1GB")


@pytest.mark.parametrize("limit", [-1, 1.5, "80", "80 XB", "GB", True])
def test_limits_that_are_none(limit: Any) -> None:
    with pytest.raises(spmd.PlanError, match="memory_limit must be a number of bytes, or a text such as '80GB'"):
        spmd.jit(lambda x: x, P(), P(), memory_limit=limit)


def test_limits_as_text() -> None:
    assert [parse_bytes(text, "x") for text in ("80GB", "1.5 MiB", "7B", "2kB")] == [80 * 10**9, 3 * 2**19, 7, 2000]


def tight_training(name: str, config: gpt.Config, batch: int) -> tuple[Training, Any, Any, Any]:
    """A training step as it is, and with the smallest memory limit."""
    strategy = layouts.STRATEGIES[name]
    training = Training(config, strategy, spmd.make_mesh(strategy.mesh, runtime="virtual"))
    tokens = TensorMeta((batch, config.context), torch.int64)
    metas = optree.tree_map(TensorMeta.of, init(config, training.optimizer)), (tokens, tokens)
    limit = smallest_peak(lambda **options: training.step(**options).plan(*metas))
    return training, training.step(), training.step(memory_limit=limit), metas


@pytest.mark.parametrize(("name", "layers"), [("fsdp", 1), *(SLOW(name, 2) for name in layouts.STRATEGIES)])
def test_a_gpt_step_under_the_smallest_limit_gives_the_values_of_one_device(name: str, layers: int) -> None:
    config = gpt.Config(layers=layers, width=64, vocab=64, context=8)
    training, free, tight, metas = tight_training(name, config, batch=16)
    plan = tight.plan(*metas)
    assert plan.memory.peak < free.plan(*metas).memory.peak
    program = verify(tight.lower(*metas))
    assert peak_bytes(program) == pytest.approx(plan.memory.peak, rel=1e-2)
    assert Counter(c.kind for c in program.collectives) == Counter(comm.kind for comm in plan.comms)
    torch.manual_seed(0)
    batch = torch.randint(64, (16, 8)), torch.randint(64, (16, 8))
    state = init(config, training.optimizer)
    expected, loss = make_step(config, training.optimizer)(state, batch)
    result, value = tight(spmd.distribute(state, training.state_spec, training.mesh), batch)
    assert value.item() == pytest.approx(loss.item(), rel=1e-5)
    whole = optree.tree_map(lambda t: t.full_tensor(), result)
    # Adam divides by the root of small squares: moments, not parameters, are what gradients agree in.
    for mine, other in zip(optree.tree_leaves(whole.optimizer), optree.tree_leaves(expected.optimizer), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_gathering_again_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    layers = [(torch.randn(16, 8, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)) for _ in range(4)]
    x = torch.randn(512, 8, dtype=torch.float64)

    def gradient(layers: Layers, x: Tensor) -> Layers:
        def loss(layers: Layers) -> Tensor:
            y = x
            for up, down in layers:
                y = y + F.linear(torch.tanh(F.linear(y, up)), down)
            return y.square().mean()

        return torch.func.grad(loss)(layers)

    mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
    args = [layers, x]

    def step(**options: Any) -> Any:
        return spmd.jit(gradient, (P("data"), P("data")), P("data"), mesh=mesh, **options)

    tight = step(memory_limit=smallest_peak(lambda **options: step(**options).plan(*args)))
    assert counts(tight.plan(*args))["all_gather"] > counts(step().plan(*args))["all_gather"]
    assert peak_bytes(verify(tight.lower(*args))) == tight.plan(*args).memory.peak
    for mine, expected in zip(optree.tree_leaves(tight(*args)), optree.tree_leaves(gradient(layers, x)), strict=True):
        assert agree(mine.full_tensor(), expected)


def test_draws_keep_their_order() -> None:
    """The second result can be had first, but its numbers are drawn after those of the first."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noise, more = torch.rand_like(x), torch.rand_like(y)
        return ((x + noise) @ x).sum() + y.sum(), (more * x).cos()

    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    graph = canonicalize(trace(step, (x, x)).graph)
    ordered = attrs.evolve(graph, operations=tuple(by_results(graph).values())).verify()
    names = [operation.name for operation in graph.operations], [operation.name for operation in ordered.operations]
    assert names[0].index("cos") > names[0].index("mm") and names[1].index("cos") < names[1].index("mm")
    torch.manual_seed(3)
    expected = step(x, x)
    torch.manual_seed(3)
    assert all(map(torch.equal, evaluate(ordered, (x, x)), expected))


def test_a_saved_plan_holds_no_more_than_the_one_that_was_saved(tmp_path: Path) -> None:
    def make(**options: Any) -> Plan:
        return plan_of(2, adamw(), P("data"), AdamWState(P(), P("data"), P("data")), **options)

    limit = smallest_peak(make)
    plan = make(memory_limit=limit)
    assert limit < make().memory.peak
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", plan.request)
    assert (str(loaded), loaded.memory.peak, counts(loaded)) == (str(plan), limit, counts(plan))


def test_layouts_change_where_computing_again_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The normalised activations of tensor parallelism, whole on every rank, are kept in shards of the tokens."""

    def step(layers: list[tuple[Tensor, Tensor, Tensor]], x: Tensor) -> Any:
        def loss(layers: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
            y = x
            for scale, up, down in layers:
                y = y + F.linear(F.gelu(F.linear(F.layer_norm(y, (WIDTH,), scale), up)), down)
            return y.square().sum()

        return optree.tree_map(lambda w, g: w - 0.1 * g, layers, torch.func.grad(loss)(layers))

    def make(**options: Any) -> Plan:
        mesh = spmd.make_mesh({"model": RANKS}, runtime="abstract")
        specs = [(P(), P("model"), P(None, "model"))] * 2
        layers = [(meta(WIDTH), meta(4 * WIDTH, WIDTH), meta(WIDTH, 4 * WIDTH))] * 2
        return spmd.jit(step, (specs, P()), specs, mesh=mesh, **options).plan(layers, meta(16, 1024, WIDTH))

    with monkeypatch.context() as patch:
        patch.setattr(orders, "PRICE_LEVELS", ())
        limit = smallest_peak(make)
        same = make(memory_limit=limit)
    smaller = smallest_peak(make)
    plan = make(memory_limit=smaller)
    assert smaller < 0.9 * limit
    assert plan.memory.peak == smaller
    assert make().seconds < same.seconds < plan.seconds


def test_stacked_layers_are_gathered_in_the_trips_of_a_loop():
    """All at once they would be held until its end; the values stay."""

    def step(weights: Tensor, x: Tensor) -> Tensor:
        def loss(weights: Tensor) -> Tensor:
            return spmd.scan(lambda x, weight: (torch.tanh(x @ weight), None), x, weights)[0].square().mean()

        return weights - torch.func.grad(loss)(weights)

    mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
    weights, x = torch.randn(6, 64, 64) / 8, torch.randn(1024, 64)
    specs = (P(None, "data"), P("data"))
    free = spmd.jit(step, specs, P(None, "data"), mesh=mesh)
    assert {comm.times for comm in free.plan(weights, x).comms if comm.kind == "all_gather"} == {1}
    limit = int(0.9 * free.plan(weights, x).memory.peak)
    within = spmd.jit(step, specs, P(None, "data"), mesh=mesh, memory_limit=limit)
    plan = within.plan(weights, x)
    assert plan.memory.peak <= limit
    assert {comm.times for comm in plan.comms if comm.kind == "all_gather"} == {6}
    torch.testing.assert_close(within(weights, x).full_tensor(), step(weights, x))


def test_a_limit_that_no_plan_of_a_loop_meets():
    mesh = spmd.make_mesh({"data": 4}, runtime="abstract")
    loop = lambda xs: spmd.scan(lambda c, x: (c + x, c * x), torch.zeros(64, 64), xs)  # noqa: E731
    with pytest.raises(
        spmd.PlanError, match=r"at most memory_limit=9 bytes per rank: the\s+smallest peak found is [\d,]+"
    ):
        spmd.jit(loop, P(None, "data"), P(), mesh=mesh, memory_limit=9).plan(meta(5, 64, 64))


def test_a_trip_computes_again_what_it_reads_twice():
    """Across the peak of the trip; the values stay, also where a branch or an inner loop stands between."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        def trip(x: Tensor, _: None) -> tuple[Tensor, None]:
            first = torch.exp(x)
            y = torch.tanh(first @ w)
            wide = spmd.scan(lambda wide, _: (wide.sin(), None), y.repeat(1, 4), None, length=2)[0]
            wide = spmd.cond(y.sum() > 0, lambda: wide.cos(), lambda: wide + 1)
            return torch.tanh(wide.sum(1, keepdim=True) + y + first), None

        return spmd.scan(trip, x, None, length=3)[0]

    mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
    x, w = torch.randn(256, 64), torch.randn(64, 64) / 8
    free = spmd.jit(step, (P("data"), P()), P("data"), mesh=mesh).plan(x, w)
    shard = 64 * 64 * 4
    within = spmd.jit(step, (P("data"), P()), P("data"), mesh=mesh, memory_limit=free.memory.peak - shard)
    plan = within.plan(x, w)
    assert plan.memory.peak <= free.memory.peak - shard
    exps = [operation for operation in plan.graph.operations if operation.op is torch.ops.aten.exp.default]
    assert len(exps) == 2
    assert len({plan.graph.regions.around(operation) for operation in exps}) == 1
    torch.testing.assert_close(within(x, w).full_tensor(), step(x, w))


def test_what_a_branch_reads_is_computed_again_before_it():
    def step(x: Tensor, w: Tensor) -> Tensor:
        first = torch.exp(x)
        wide = (first @ w).repeat(1, 4).sin().sum(1, keepdim=True)
        return spmd.cond(wide.sum() > 0, lambda: first + wide, lambda: first.cos() * wide)

    mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
    x, w = torch.randn(256, 64), torch.randn(64, 64) / 8
    free = spmd.jit(step, (P("data"), P()), P("data"), mesh=mesh).plan(x, w)
    within = spmd.jit(step, (P("data"), P()), P("data"), mesh=mesh, memory_limit=free.memory.peak - 1)
    plan = within.plan(x, w)
    exps = [operation for operation in plan.graph.operations if operation.op is torch.ops.aten.exp.default]
    assert [None, None] == [plan.graph.regions.around(operation) for operation in exps]
    torch.testing.assert_close(within(x, w).full_tensor(), step(x, w))
