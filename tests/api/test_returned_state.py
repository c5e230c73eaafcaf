"""Results that go in again as arguments: without `out_specs` they have the specs of the arguments that they replace."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch import Tensor

import spmd
from spmd import P
from spmd.core.pytree import tree_leaves, tree_map

MESH = spmd.make_mesh({"data": 2, "model": 3}, runtime="virtual")


class Step(NamedTuple):
    loss: Tensor
    params: dict[str, Tensor]


@attrs.define
class State:
    params: dict[str, Tensor]
    momentum: dict[str, Tensor]
    count: Tensor
    lr: float


def params(rows: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"w": torch.randn(rows, 6), "b": torch.randn(6)}


def loss_of(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    return torch.tanh(batch @ params["w"] + params["b"]).square().mean()


def train(state: State, batch: Tensor) -> State:
    gradients = torch.func.grad(loss_of)(state.params, batch)
    momentum = {name: 0.9 * m + gradients[name] for name, m in state.momentum.items()}
    updated = {name: p - state.lr * momentum[name] for name, p in state.params.items()}
    return State(updated, momentum, state.count + 1, state.lr / 2)


def state_of(rows: int) -> State:
    return State(params(rows), tree_map(torch.zeros_like, params(rows)), torch.tensor(0), 0.1)


LAYOUTS = {
    "plain": (None, None),
    "replicated": (P(), P()),
    "sharded": ({"w": P("model", "data"), "b": P("data")}, {"w": P(None, ("model", "data")), "b": P("model")}),
    "zero": (P(), {"w": P("data", "model"), "b": P(("data", "model"))}),
}


@pytest.mark.parametrize("given", [False, True], ids=["own", "in_specs"])
@pytest.mark.parametrize("rows", [4, 5, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_functional_training_loop_compiles_once(layout: str, rows: int, given: bool) -> None:
    specs = State(*LAYOUTS[layout], P(), None)  # type: ignore[arg-type]
    batch, expected = torch.randn(7, rows), state_of(rows)
    state = state_of(rows)
    if layout != "plain":
        held = spmd.distribute((state.params, state.momentum), LAYOUTS[layout], MESH)
        state = State(*held, state.count, state.lr)
    step = spmd.jit(train, (specs, P("data")) if given else None, mesh=MESH)
    for _ in range(3):
        state, expected = step(state, batch), train(expected, batch)
    assert (2, 1) == step.cache_info()[:2]
    assert expected.lr == state.lr
    for mine, theirs in zip(tree_leaves(state), tree_leaves(expected), strict=True):
        torch.testing.assert_close(mine.full_tensor() if isinstance(mine, spmd.DTensor) else mine, theirs)


LAID_OUT = {"a": P("data"), "b": P(None, "data"), "c": P("model"), "d": P(None, "model")}


def states() -> dict[str, dict[str, Tensor]]:
    """Four states of equal structure, each with specs of its own."""
    given = {name: {"w": torch.ones(6, 6), "v": torch.zeros(6, 6)} for name in LAID_OUT}
    return spmd.distribute(given, LAID_OUT, MESH)  # type: ignore[no-any-return]


def taken(result: Any) -> Any:
    """The argument whose specs a result has; of the items of a tuple or dict each."""
    if isinstance(result, dict) and "w" not in result:
        return {key: taken(item) for key, item in result.items()}
    if type(result) is tuple or isinstance(result, Step):
        return tuple(map(taken, result))
    specs = {leaf.spec.pspec if isinstance(leaf, spmd.DTensor) else leaf.pspec for leaf in tree_leaves(result)}
    return next((name for name, spec in LAID_OUT.items() if specs == {spec}), None)


def given_to(function: spmd.api.jit.Jitted, *args: Any) -> Any:
    """As `taken`, by the specs that the planner is given."""
    compiled = function.compile(*args)
    return taken(compiled.traced.result(compiled.staged.given_out_specs))


def new(state: Any) -> Any:
    return tree_map(lambda x: x.T.cos().T, state)


def loss(state: Any) -> Tensor:
    return state["w"].sum()  # type: ignore[no-any-return]


MATCHES: dict[str, tuple[Callable[..., Any], str, tuple[int, ...], Any]] = {
    "one": (lambda a, b: new(b), "ab", (), "a"),
    "one donated": (lambda a, b: new(b), "ab", (1,), "b"),
    "in order": (lambda a, b: (new(a), new(b)), "ab", (), ("a", "b")),
    "in order, loss first": (lambda a, b: (loss(a), new(a), new(b)), "ab", (), (None, "a", "b")),
    "in order, none at its position": (lambda x, a, b: (new(a), new(b)), "?ab", (), ("a", "b")),
    "its position": (lambda a, b, c: (loss(a), new(b)), "abc", (), (None, "b")),
    "its position before donated": (lambda a, b, c: (loss(a), new(b)), "abc", (2,), (None, "b")),
    "donated": (lambda x, a, b: (new(b), loss(b)), "?ab", (2,), ("b", None)),
    "the first": (lambda x, a, b: (new(a), loss(a)), "?ab", (), ("a", None)),
    "one argument serves one": (lambda a: (new(a), new(a)), "a", (), ("a", None)),
    "three of four": (lambda a, b, c, d: (new(a), new(b), new(c)), "abcd", (3,), ("a", "b", "c")),
    "names of a dict": (
        lambda a, b: {"loss": loss(a), "b": new(b), "a": new(a)},
        "ab",
        (),
        {"loss": None, "b": "b", "a": "a"},
    ),
    "order of a dict": (lambda a, b: {"z": new(a), "y": new(b)}, "ab", (), {"z": "a", "y": "b"}),
    "ordered dict": (lambda a, b: OrderedDict(l=loss(a), a=new(a)), "ab", (), {"l": None, "a": "a"}),
    "named tuple": (lambda a, b: Step(loss(a), new(b)), "ab", (), (None, "b")),
    "inside a list": (lambda a, b: [new(a), new(b)], "ab", (), None),
    "deeper": (lambda a, b: (loss(a), (new(a), loss(b))), "ab", (), (None, (None, None))),
    "another structure": (lambda a, b: (loss(a), dict(new(a), u=loss(a))), "ab", (), (None, None)),
    "another shape": (lambda a, b: tree_map(lambda x: x[:3], a), "ab", (), None),
    "another dtype": (lambda a, b: tree_map(torch.Tensor.double, a), "ab", (), None),
    "one tensor": (lambda a, b: new(a["w"]), "ab", (), None),
    "items that are one tensor": (lambda a, b: (new(a["w"]), {"w": new(b["w"])}), "ab", (0,), (None, None)),
}


@pytest.mark.parametrize("case", MATCHES)
def test_which_argument_a_result_replaces(case: str) -> None:
    function, names, donated, expected = MATCHES[case]
    given = states()
    args = [torch.ones(2) if name == "?" else given[name] for name in names]
    jitted = spmd.jit(function, mesh=MESH, donate_argnums=donated)
    assert expected == given_to(jitted, *args)
    with spmd.disable_jit():
        assert expected == taken(jitted(*args))


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x, y: new(y), P(None, "model")),
        (lambda x, y: (x.sum(), new(y)), P(None, "model")),
        (lambda x, y: {"new": new(y)}, P(None, "model")),
        (lambda x, y: (new(y), new(y)), P(None, "model")),
    ],
)
def test_one_tensor_alone_replaces_a_donated_one(function: Callable[..., Any], expected: P) -> None:
    x, y = spmd.distribute((torch.ones(6, 6), torch.ones(6, 6)), (P("data"), expected), MESH)
    found = [leaf.spec.pspec for leaf in tree_leaves(spmd.jit(function, mesh=MESH, donate_argnums=1)(x, y))]
    assert 1 == found.count(expected) if len(found) == 1 else expected in found
    x, y = spmd.distribute((torch.ones(6, 6), torch.ones(6, 6)), (P("data"), expected), MESH)
    assert expected not in [leaf.spec.pspec for leaf in tree_leaves(spmd.jit(function, mesh=MESH)(x, y))]


def test_nothing_is_pending_in_what_goes_in_again() -> None:
    pending = P("data", partial={"model": "sum"})
    given = spmd.distribute({"w": torch.ones(4, 6), "v": torch.ones(4, 6)}, pending, MESH)
    step = spmd.jit(lambda state, x: {name: leaf + x for name, leaf in state.items()}, mesh=MESH)
    result = step(step(given, 1.0), 1.0)
    assert {P("data")} == {leaf.spec.pspec for leaf in result.values()}
    torch.testing.assert_close(result["w"].full_tensor(), torch.full((4, 6), 3.0))
    assert 2 == step.cache_info().misses  # one for the summands, one for what it returns


def test_free_leaves_all_results_to_the_planner() -> None:
    state, function = states()["a"], lambda a, x: (new(a), x)
    free = spmd.jit(function, None, spmd.FREE, mesh=MESH)
    explicit = spmd.jit(function, None, (None, None), mesh=MESH)
    named = spmd.jit(function, mesh=MESH, out_shardings=spmd.FREE)
    for each in (free, explicit, named):
        assert (None, None) == given_to(each, state, torch.ones(2))
    inlined = spmd.jit(lambda a, x: free(a, x)[0], mesh=MESH)
    assert "a" == given_to(inlined, state, torch.ones(2))
    with pytest.raises(spmd.ShardingError, match=r"spmd\.FREE is not a spec\. It is out_specs of jit as a whole"):
        spmd.jit(function, None, (spmd.FREE, None), mesh=MESH)(state, torch.ones(2))
    with pytest.raises(spmd.ShardingError, match=r"in_specs does not fit .*spmd\.FREE is not a spec"):
        spmd.jit(function, spmd.FREE, mesh=MESH)(state, torch.ones(2))


def test_a_function_in_another_one_is_left_to_the_planner() -> None:
    state = states()["a"]
    inner = spmd.jit(new, mesh=MESH)
    outer = spmd.jit(lambda a: inner(a)["w"].sum(), mesh=MESH)
    assert not [operation for operation in outer.trace(state).graph.operations if "constrain" in operation.name]


def test_the_log_says_which_argument_was_taken(caplog: pytest.LogCaptureFixture) -> None:
    step = spmd.jit(lambda a, x, *, b: (new(a), x.sum(), new(b)), mesh=MESH, donate_argnums=0)
    given = states()
    with spmd.log_compiles(), caplog.at_level(logging.WARNING, logger="spmd"):
        step(given["a"], torch.ones(2), b=given["b"])
    text = "result 0 has the specs of argument 0, result 2 has the specs of argument b"
    assert f"{text}. out_specs=spmd.FREE leaves them to the planner." in caplog.messages[-1]
    caplog.clear()
    with spmd.log_compiles(), caplog.at_level(logging.WARNING, logger="spmd"):
        spmd.jit(new, None, spmd.FREE, mesh=MESH)(given["b"])
    assert 1 == len(caplog.messages)


def test_static_arguments_have_no_position() -> None:
    given = states()
    step = spmd.jit(lambda name, a, b, c: (new(a), new(b)), mesh=MESH, static_argnums=0)
    assert ("a", "b") == taken(step("adam", given["a"], given["b"], given["c"]))


def test_methods_and_modules_beside_a_state() -> None:
    class Trainer:
        @spmd.jit(mesh=MESH)
        def step(self, a: Any, x: Tensor) -> Any:
            return loss(a), new(a)

    assert (None, "a") == taken(Trainer().step(states()["a"], torch.ones(2)))
    module = torch.nn.BatchNorm1d(6)

    def step(module: Any, a: Any) -> Any:
        return new(a), module(a["w"]).sum()

    jitted = spmd.jit(step, mesh=MESH)
    with torch.no_grad():
        assert ("a", None) == taken(jitted(module, states()["a"]))
    torch.testing.assert_close(module.running_mean, torch.full((6,), 0.1))
    with spmd.disable_jit(), torch.no_grad():
        assert ("a", None) == taken(jitted(module, states()["a"]))


def test_transforms_from_outside_have_the_same_results() -> None:
    state = states()["b"]
    step = spmd.jit(lambda a: {name: leaf.sin() for name, leaf in a.items()}, LAID_OUT["b"], mesh=MESH)
    result, pull = torch.func.vjp(step, state)
    assert "b" == taken(result) == taken(pull(result)[0]) == taken(torch.func.jvp(step, (state,), (state,))[1])
    rows = spmd.jit(lambda a: {name: leaf.sin() for name, leaf in a.items()}, P("data"), mesh=MESH)
    assert "b" == taken(torch.func.vmap(rows)(state))
    given = {name: leaf.detach().requires_grad_() for name, leaf in state.items()}
    recorded = step(given)
    recorded["w"].sum().backward()
    assert "b" == taken(recorded) and given["w"].grad.spec.pspec == LAID_OUT["b"]


def test_a_body_of_shard_map_in_the_function() -> None:
    mapped = spmd.shard_map(lambda a: tree_map(torch.sin, a), MESH, P("model"), P("model"))
    result = spmd.jit(lambda a: mapped(a), mesh=MESH)(states()["a"])
    assert "a" == taken(result)
    torch.testing.assert_close(result["w"].full_tensor(), torch.ones(6, 6).sin())


def test_a_body_with_automatic_axes_has_the_specs_of_its_own() -> None:
    """Along manual axes a result has its out_specs, also if an argument of equal shapes is laid out in another way."""
    held = P("model", "data")
    given = {"w": torch.ones(6, 6), "v": torch.ones(6, 6)}
    total = lambda a: tree_map(lambda x: spmd.collectives.all_gather(x, "model", to="invariant", tiled=True), a)  # noqa: E731
    mapped = spmd.shard_map(total, MESH, P("model"), P(), axis_names={"model"})
    results = mapped(spmd.distribute(given, held, MESH))
    assert not any("model" in dim for leaf in results.values() for dim in leaf.spec.dims)
    with spmd.disable_jit():
        torch.testing.assert_close(mapped(given)["w"].full_tensor(), given["w"])
