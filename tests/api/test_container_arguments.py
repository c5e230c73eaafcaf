"""Dataclasses and containers of other packages as arguments and results, against one device."""

import dataclasses

import pytest
import torch
from container_cases import (
    Batch,
    Cache,
    Encoding,
    Fields,
    Frozen,
    Kind,
    Layer,
    Output,
    Pair,
    Registered,
    State,
    Unknown,
)

import spmd
from spmd import P
from spmd.core.pytree import tree_leaves, tree_map

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
X, Y = torch.arange(10.0).reshape(5, 2), torch.linspace(-1, 1, 10).reshape(5, 2)


def next_state(state):
    return dataclasses.replace(state, params={"w": state.params["w"] * (2 if state.mask is None else state.mask)})


def swapped(pair):
    return Pair(pair.second.sin(), pair.first, flag=not pair.flag)


CASES = [
    (next_state, State({"w": X}, step=3, kind=Kind.RIGHT), {"params": P("data")}),
    (next_state, State({"w": X}, mask=Y), State({"w": P("data")}, mask=P(None, "model"))),
    (lambda state: Frozen(state.w + state.total, sizes=state.sizes), Frozen(X, [1, 2]), P()),
    (lambda fields: Fields(fields.w.cos(), fields.name * 2), Fields(X), {"w": P("data", "model")}),
    (lambda out: Output(out.loss * 2, (out.loss, out.hidden)), Output(X, Y), {"loss": P("data"), "hidden": P("model")}),
    (swapped, Pair(X, Y), P("data")),
    (lambda batch: Encoding({"sum": batch["a"] + batch["b"]}), Encoding({"a": X, "b": Y}), {"a": P("data"), "b": P()}),
    (lambda states: [State(states[0].params), Output(states[1].w)], [State(X), Fields(Y)], [P("data"), {"w": P()}]),
]


def assert_equal(expected, result):
    found = tree_map(as_plain, result)
    assert type(expected) is type(found)
    for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("out_specs", [None, P("data")])
@pytest.mark.parametrize(("function", "argument", "specs"), CASES)
def test_values_and_types_are_those_of_one_device(function, argument, specs, out_specs):
    jitted = spmd.jit(function, (specs,), out_specs if out_specs is None else P(), mesh=MESH)
    for given in (argument, tree_map(lambda x: x + 1, argument), spmd.distribute(argument, specs, MESH)):
        expected = function(given if given is argument else tree_map(as_plain, given))
        assert_equal(expected, jitted(given))
    assert 1 == jitted.cache_info().currsize


def as_plain(x):
    return x.full_tensor() if isinstance(x, spmd.DTensor) else x


def test_values_of_fields_go_through():
    result = spmd.jit(next_state, (P("data"),), P("data"), mesh=MESH)(State({"w": X}, step=3, kind=Kind.RIGHT))
    assert (3, None, Kind.RIGHT) == (result.step, result.mask, result.kind)


def test_other_values_in_fields_are_other_programs():
    step = spmd.jit(lambda state: state.params * (state.step + (state.mask is not None)), (P(),), P(), mesh=MESH)
    given = [
        State(X, 1),
        State(X, 2),
        State(X, 1),
        State(X, 1, mask=Y),
        State(X, 1.0),
        State(X, 2),
        State(X, 1, mask=Y),
    ]
    for state in given:
        assert_equal(X * (state.step + (state.mask is not None)), step(state))
    assert 4 == step.cache_info().currsize


def test_what_a_function_does_to_its_argument_stays_inside():
    def count(state):
        state.step += 1
        state.params["v"] = state.params["w"] + 1
        return state

    state = State({"w": X})
    result = spmd.jit(count, (P(),), P(), mesh=MESH)(state)
    assert (1, 0, ["w"]) == (result.step, state.step, list(state.params))
    assert_equal(X + 1, result.params["v"])


def test_out_specs_by_field():
    jitted = spmd.jit(lambda x: Output(x.sum(), (x,)), (P("data"),), {"loss": P(), "hidden": (P("model"),)}, mesh=MESH)
    result = jitted(X)
    assert (P(), P("model")) == (result.loss.spec.pspec, result.hidden[0].spec.pspec)


@pytest.mark.parametrize(
    ("argument", "specs"),
    [
        (Output(X, Y), {"loss": P("data"), "hidden": P("model")}),
        (Pair(X, Y), P("data")),
        (Registered(X, Y), {"first": P("data"), "second": P()}),
    ],
)
def test_gradients_are_those_of_one_device(argument, specs):
    def loss(tree):
        one, other = tree.values() if isinstance(tree, Output) else (tree.first, tree.second)
        return (one.sin() * other).sum()

    expected = torch.func.grad(loss)(argument)
    jitted = spmd.jit(loss, (specs,), P(), mesh=MESH)
    assert_equal(expected, torch.func.grad(jitted)(spmd.distribute(argument, specs, MESH)))
    assert_equal(expected, spmd.jit(torch.func.grad(loss), (specs,), specs, mesh=MESH)(argument))


def test_gradients_of_tensors_in_dataclasses():
    state = State({"w": X.clone().requires_grad_()}, mask=Y)
    (expected,) = torch.autograd.grad(next_state(state).params["w"].square().sum(), state.params["w"])
    placed = spmd.distribute(dataclasses.replace(state, params={"w": X}), P("data"), MESH)
    placed.params["w"].requires_grad_()
    result = spmd.jit(next_state, (P("data"),), P("data"), mesh=MESH)(placed)
    result.params["w"].square().sum().backward()
    assert_equal(expected, placed.params["w"].grad)


def test_caches_grow_as_on_one_device():
    def step(cache, keys):
        if not cache.layers:
            cache.layers.append(Layer())
        cache.layers[0].update(keys)
        return cache

    jitted = spmd.jit(step, (P(None, "data"), P(None, "data")), P(None, "data"), mesh=MESH)
    result = jitted(jitted(Cache(), X), Y)
    assert (Cache, Layer, True) == (type(result), type(result.layers[0]), result.layers[0].is_initialized)
    assert_equal(torch.cat([X, Y]), result.layers[0].keys)


def test_containers_in_shard_map_and_constrain_by_inner_functions():
    double = lambda state: dataclasses.replace(state, params=state.params * 2)  # noqa: E731
    mapped = spmd.shard_map(double, mesh=MESH, in_specs=({"params": P("data")},), out_specs=State(P("data")))
    inner = spmd.jit(double, ({"params": P("data")},), P("data"))
    outer = spmd.jit(lambda state: inner(mapped(state)), (P(),), P(), mesh=MESH)
    given = State(X[:4], step=5)
    assert_equal(State(X[:4] * 4, step=5), outer(given))


def test_without_jit():
    with spmd.disable_jit():
        assert_equal(State({"w": X * 2}), spmd.jit(next_state, (P("data"),), P("data"), mesh=MESH)(State({"w": X})))


def test_objects_of_other_classes_are_errors():
    for held, path in (
        (Unknown(X), "0"),
        (State(Unknown(X)), r"0\.params"),
        (State(X, mask=[Unknown(X)]), r"0\.mask\[0\]"),
    ):
        with pytest.raises(spmd.ShardingError, match=rf"argument {path} is no tensor .*register Unknown with optree"):
            spmd.jit(lambda state: state, (P(),), mesh=MESH)(held)


def test_checkpoints_store_the_numbers_in_fields(tmp_path):
    state = State({"w": spmd.distribute(X, P("data"), MESH)}, step=7)
    spmd.checkpoint.save({"state": state, "out": Output(X)}, tmp_path)
    like = {"state": State({"w": P(None, "model")}, step=0), "out": Output(torch.empty(5, 2))}
    loaded = spmd.checkpoint.load(tmp_path, like, mesh=MESH)
    assert (State, 7, Output) == (type(loaded["state"]), loaded["state"].step, type(loaded["out"]))
    assert_equal({"w": X}, loaded["state"].params)
    assert torch.equal(X, loaded["out"].loss)
    with pytest.raises(spmd.CheckpointError, match=r"state\.params\.v: missing"):
        spmd.checkpoint.load(tmp_path, {"state": State({"v": P()})}, mesh=MESH)


def batch_of_stand_in(**tensors):
    return Batch(tensors, (5,))


def batch_of_tensordict(**tensors):
    return pytest.importorskip("tensordict").TensorDict(tensors, batch_size=[5])


@pytest.mark.parametrize("make", [batch_of_stand_in, batch_of_tensordict])
def test_batches_of_tensors_by_name(make):
    def loss(w, batch):
        out = make(y=(batch["x"] @ w).sin(), z=batch["z"] * 2)
        return (out["y"] * out["z"]).sum(), out

    given, w = make(x=X, z=Y), torch.linspace(0, 1, 4).reshape(2, 2)
    expected, out = torch.func.grad(loss, has_aux=True)(w, given)
    jitted = spmd.jit(torch.func.grad(loss, has_aux=True), (P(None, "model"), P("data")), mesh=MESH)
    for batch in (given, spmd.distribute(given, P("data"), MESH)):
        gradient, found = jitted(w, batch)
        assert (type(out), tuple(out.batch_size)) == (type(found), tuple(found.batch_size))
        assert_equal(expected, gradient)
        for name in ("y", "z"):
            assert_equal(out[name], found[name])
