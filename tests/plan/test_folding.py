"""Equal layers are planned once; a layer that differs in anything is planned by itself."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import P
from spmd.inspect import Plan
from spmd.plan.memory.peak import memory_of
from spmd.plan.search.equal_layers import Layers
from spmd.plan.search.folding import fold
from spmd.plan.search.options import SEARCH
from spmd.plan.search.orders import plan as search
from spmd.plan.search.prepare import prepare

REPLICATED = P()
WHOLE = attrs.evolve(SEARCH, fold=False)
Params = list[dict[str, Tensor]]


def block(w: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.layer_norm(x, x.shape[-1:], w["scale"])
    return x + F.linear(F.gelu(F.linear(h, w["up"])), w["down"])


def step(params: Params, x: Tensor, change: Callable[[int, Tensor], Tensor] = lambda _, x: x) -> Any:
    def loss(params: Params) -> Tensor:
        h = x
        for number, w in enumerate(params):
            h = change(number, block(w, h))
        return h.square().mean()

    grads, value = torch.func.grad_and_value(loss)(params)
    return [{k: w[k] - 0.1 * g[k] for k in w} for w, g in zip(params, grads, strict=True)], value


def params(layers: int, width: int = 8) -> Params:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return [{"scale": draw(width), "up": draw(4 * width, width), "down": draw(width, 4 * width)} for _ in range(layers)]


def plan_of(
    function: Callable[..., Any],
    state: Any,
    specs: Any = REPLICATED,
    axes: dict[str, int] | None = None,
    **options: Any,
) -> Plan:
    mesh = spmd.make_mesh(axes or {"data": 4}, runtime="virtual")
    batch = P(next(iter(mesh.names)))
    return spmd.jit(function, (specs, batch), mesh=mesh, **options).plan(state, torch.ones(8, 8))


def left_out(plan: Plan) -> list[int]:
    """The layers that another one stands for."""
    prepared = prepare(plan.request)
    layers = Layers(prepared.draft(plan.order), prepared.repeats)
    return [layer for _, first, last in layers.equal() for layer in range(first + 1, last + 1)]


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}, {"data": 3}])
@pytest.mark.parametrize("specs", [P(), P("data")])
def test_the_plan_is_that_of_the_search_of_every_layer(axes: dict[str, int], specs: P) -> None:
    plan = plan_of(step, params(7), specs, axes)
    whole = search(plan.request, WHOLE)
    assert left_out(plan) == [3, 4, 5]
    assert plan.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert [attrs.astuple(comm) for comm in plan.comms] == [attrs.astuple(comm) for comm in whole.comms]
    assert str(search(plan.request)) == str(whole)


def test_layers_that_are_computed_again_are_folded() -> None:
    def checkpointed(state: Params, x: Tensor) -> Any:
        def loss(state: Params) -> Tensor:
            h = x
            for w in state:
                h = checkpoint(block, w, h, use_reentrant=False)
            return h.square().mean()

        return torch.func.grad(loss)(state)

    plan = plan_of(checkpointed, params(8), P("data"))
    assert len(left_out(plan)) >= 3
    assert str(search(plan.request)) == str(search(plan.request, WHOLE))


def test_a_longer_program_is_folded_to_the_same_length() -> None:
    lengths = []
    for layers in (6, 12):
        prepared = prepare(plan_of(step, params(layers)).request)
        folded = fold(prepared.draft(("data",)), prepared.repeats)
        lengths.append(len(folded.draft.graph.operations))
        assert len(folded.whole.graph.operations) > lengths[-1]
        assert len(folded.draft.counts.ties) == 2  # the residual stream, forward and backward
    assert lengths[0] == lengths[1]


def scaled(number: int, x: Tensor) -> Tensor:
    return x * 2 if number == 4 else x


def numbered(number: int, x: Tensor) -> Tensor:
    return x * (1 + number)


def constrained(number: int, x: Tensor) -> Tensor:
    return spmd.constrain(x, P()) if number == 4 else x


def drawn(number: int, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) if number == 4 else x


def cast(number: int, x: Tensor) -> Tensor:
    return x.double().float() if number == 4 else x


UNEQUAL = [scaled, constrained, drawn, cast]


@pytest.mark.parametrize("change", UNEQUAL)
def test_a_layer_that_computes_something_else_is_planned_by_itself(change: Callable[[int, Tensor], Tensor]) -> None:
    plan = plan_of(lambda p, x: step(p, x, change), params(9))
    assert 4 not in left_out(plan) and 5 not in left_out(plan)


def test_layers_with_numbers_of_their_own_are_all_planned() -> None:
    assert not left_out(plan_of(lambda p, x: step(p, x, numbered), params(9)))


def test_layers_of_another_width_spec_or_constraint_are_planned_by_themselves() -> None:
    wide = params(9)
    wide[4] = {**wide[4], "up": torch.ones(16, 8), "down": torch.ones(8, 16)}
    assert not {4, 5} & set(left_out(plan_of(step, wide)))
    specs = [{name: P("data") if (number, name) == (4, "up") else P() for name in w} for number, w in enumerate(wide)]
    assert not {4, 5} & set(left_out(plan_of(step, params(9), specs)))
    kept = plan_of(step, params(9), P("data"), keep_sharded={"0[4]['up']": "data"})
    assert not {4, 5} & set(left_out(kept))


def test_a_layer_whose_result_is_returned_or_read_elsewhere_is_planned_by_itself() -> None:
    def forward(params: Params, x: Tensor) -> Any:
        found = []
        for w in params:
            x = block(w, x)
            found.append(x)
        return x, found[4], found[6].sum()

    plan = plan_of(forward, params(10))
    assert not {4, 5, 6, 7} & set(left_out(plan))


def test_a_shared_weight_is_resharded_once() -> None:
    shared = params(1)[0]

    def forward(w: dict[str, Tensor], x: Tensor) -> Tensor:
        for _ in range(8):
            x = block(w, x)
        return x

    plan = plan_of(forward, shared, P("data"))
    whole = search(plan.request, WHOLE)
    assert left_out(plan) and plan.seconds <= 1.001 * whole.seconds
    assert sum(comm.kind == "all_gather" for comm in plan.comms) <= 3


def test_all_layers_may_take_a_value_of_the_first_or_feed_the_last() -> None:
    def results(params: Params, x: Tensor) -> list[Tensor]:
        h, table, seen = x, x, []
        for number, w in enumerate(params):
            h = block(w, h + table)
            table = h.sum(0) if number == 0 else table
            seen.append(h)
        return seen

    def forward(params: Params, x: Tensor) -> Tensor:
        return torch.stack(results(params, x)).sum()

    def training(params: Params, x: Tensor) -> Any:
        return torch.func.grad(lambda params: results(params, x)[-1].mean())(params)

    for function in (forward, training):
        plan = plan_of(function, params(9), P("data"))
        assert left_out(plan)
        assert plan.seconds <= 1.001 * search(plan.request, WHOLE).seconds


def test_plans_under_a_memory_limit_fit_and_values_are_those_of_one_device() -> None:
    state, x = params(8), torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    free = plan_of(step, state, P("data"))
    limit = int(0.8 * memory_of(free).peak)
    limited = plan_of(step, state, P("data"), memory_limit=limit)
    assert memory_of(limited).peak <= limit
    mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
    for plan in (free, limited):
        run = spmd.jit(step, (P("data"), P("data")), mesh=mesh, memory_limit=plan.request.memory_limit)
        (found, value), (expected, loss) = spmd.full_tree(run(state, x)), step(state, x)
        torch.testing.assert_close(value, loss)
        torch.testing.assert_close(found, expected)


def test_reuse_layers_false_plans_each_layer() -> None:
    plan = plan_of(step, params(7), reuse_layers=False)
    assert str(plan) == str(search(plan.request, WHOLE))


def test_layers_in_a_loop_and_loops_in_layers_are_folded() -> None:
    def microbatches(params: Params, x: Tensor) -> Any:
        def add(total: Params, batch: Tensor) -> tuple[Params, Tensor]:
            def loss(params: Params) -> Tensor:
                h = batch
                for w in params:
                    h = block(w, h)
                return h.square().mean()

            grads, value = torch.func.grad_and_value(loss)(params)
            return [{k: t[k] + g[k] for k in t} for t, g in zip(total, grads, strict=True)], value

        zeros = [{name: torch.zeros_like(w) for name, w in layer.items()} for layer in params]
        return spmd.scan(add, zeros, x.unflatten(0, (2, 4)))

    def recurrent(params: Params, x: Tensor) -> Any:
        def loss(params: Params) -> Tensor:
            h = x
            for w in params:
                h = spmd.fori_loop(0, 3, lambda _, h, w=w: block(w, h), h)
            return h.square().mean()

        return torch.func.grad(loss)(params)

    for function in (microbatches, recurrent):
        for specs in (P(), P("data")):
            plan = plan_of(function, params(8), specs)
            whole = search(plan.request, WHOLE)
            assert left_out(plan)
            assert plan.seconds <= 1.001 * whole.seconds
        mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
        state, x = params(8), torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        found = spmd.full_tree(spmd.jit(function, (P("data"), P("data")), mesh=mesh)(state, x))
        torch.testing.assert_close(found, function(state, x))


@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")])
def test_every_order_of_two_axes_is_finished(axes: tuple[str, str]) -> None:
    """In one order two gathers of a weight become one in the end, which halves the time; the search does not know."""
    specs = [{"scale": P(), "up": P(axes), "down": P(axes)}] * 7
    plan = plan_of(step, params(7), specs, {"data": 2, "model": 2})
    assert left_out(plan)
    assert plan.seconds == pytest.approx(search(plan.request, WHOLE).seconds, rel=1e-9)
