"""Draws by keys on meshes: every layout, transform and runtime has the numbers of one device, and sends nothing."""

from __future__ import annotations

from itertools import product

import keyed_cases
import pytest
import torch
from sampling import sample
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import P, random

MESHES = {
    "1": {"x": 1},
    "2": {"x": 2},
    "3": {"x": 3},
    "8": {"x": 8},
    "2x4": {"x": 2, "y": 4},
    "2x2x2": dict.fromkeys("xyz", 2),
}
KEY = keyed_cases.KEY


def mesh_of(name):
    return spmd.make_mesh(MESHES[name], runtime="virtual")


KINDS = ("bits", "bytes", "uniform", "normal", "gumbel", "exponential", "double", "dropout")
CASES = [
    *product(MESHES, [(7, 5)], KINDS, ("philox4x32", "threefry2x32")),
    *product(MESHES, [(8, 12), (3, 2), (0, 3)], ["uniform"], ["philox4x32"]),
]
FAST = [
    ("1", (8, 12), "uniform", "philox4x32"),
    ("2", (7, 5), "double", "threefry2x32"),
    ("3", (7, 5), "bits", "threefry2x32"),
    ("8", (3, 2), "uniform", "philox4x32"),
    ("2x4", (7, 5), "bits", "philox4x32"),
    ("3", (0, 3), "uniform", "philox4x32"),
]


@pytest.mark.parametrize("case", sample(CASES, FAST))
def test_every_spec_has_the_numbers_of_one_device(case):
    name, shape, kind, impl = case
    found, sent = keyed_cases.draws_by_spec(shape, kind, impl, mesh_of(name))
    expected = keyed_cases.all_draws(random.wrap_key_data(KEY.data, impl=impl), len(found), shape, kind)
    assert sent == 0
    assert all(map(torch.equal, expected, found))


def test_a_draw_of_many_dims():
    mesh = mesh_of("2x2x2")
    specs = [P(None, "y", "x", "z"), P("x", None, None, ("z", "y")), P(None, ("z", "y", "x")), P(("y", "z"), "x")]
    draws = spmd.jit(lambda key: keyed_cases.all_draws(key, 4, (3, 4, 5, 6), "bits"), None, specs, mesh=mesh)
    assert () == draws.plan(KEY).comms
    found = [value.full_tensor() for value in draws(KEY)]
    assert all(map(torch.equal, keyed_cases.all_draws(KEY, 4, (3, 4, 5, 6), "bits"), found))


def loss(x, key):
    return (random.dropout(key, x, 0.3).sin() * random.normal(random.fold_in(key, 1), x.shape)).sum()


def kept(x, key):
    return random.dropout(key, x, 0.3).sin().square().sum()


def recomputed(x, key):
    return checkpoint(lambda x: random.dropout(key, x, 0.3).sin(), x, use_reentrant=False).square().sum()


def scanned(x, key):
    def step(carry, row):
        key, total = carry
        key, own = random.split(key)
        return (key, total + random.dropout(own, row).sum()), random.uniform(own, (6,), None, row.min(), 5.0)

    (_, total), rows = spmd.scan(step, (key, x.new_zeros(())), x)
    return total + (rows * x).sum()


def folded(x, key):
    def step(number, total):
        return total + random.uniform(random.fold_in(key, number), x.shape) * x

    return spmd.fori_loop(0, 3, step, torch.zeros_like(x)).sum()


def batched(x, key):
    return torch.func.vmap(random.dropout)(random.split(key, len(x)), x).square().sum()


@pytest.mark.parametrize(
    "function", [loss, recomputed, scanned, folded, batched], ids=lambda function: function.__name__
)
def test_gradients_through_draws(function):
    x = torch.randn(4, 6)
    expected = torch.func.grad_and_value(kept if function is recomputed else function)(x, KEY)
    for spec in (P("x", "y"), P("y"), P(None, ("x", "y")))[: 3 if function is batched else 1]:
        jitted = spmd.jit(torch.func.grad_and_value(function), (spec, P()), (spec, P()), mesh=mesh_of("2x4"))
        found = [value.full_tensor() for value in jitted(x, KEY)]
        assert torch.equal(expected[0], found[0])
        torch.testing.assert_close(expected[1], found[1])
    eager = spmd.jit(function, (P("x", "y"), P()), P(), mesh=mesh_of("2x4"))
    with spmd.disable_jit():
        torch.testing.assert_close(expected[1], eager(x, KEY).full_tensor())


def test_ends_have_gradients_and_tangents():
    ends = torch.tensor([0.5, 2.0])
    draw = lambda ends: random.uniform(KEY, (9,), None, ends[0], ends[1])  # noqa: E731
    cut = lambda ends: random.truncated_normal(KEY, ends[0], ends[1], (9,))  # noqa: E731
    for function in (draw, cut):
        expected = torch.func.jacfwd(function)(ends)
        torch.testing.assert_close(expected, torch.func.jacrev(function)(ends))
        jitted = spmd.jit(torch.func.jacrev(function), P(), P("x"), mesh=mesh_of("3"))
        torch.testing.assert_close(expected, jitted(ends).full_tensor())
    unit = random.uniform(KEY, (9,))
    torch.testing.assert_close(torch.stack([1 - unit, unit], 1), torch.func.jacfwd(draw)(ends))


def test_in_a_manual_region_an_invariant_key_draws_the_same_on_all_ranks():
    def body(key, x):
        own = random.fold_in(key, spmd.collectives.axis_index("x"))
        return random.normal(key, (3,)), random.normal(own, (3,)), random.dropout(own, x)

    x = torch.ones(4, 6)
    specs = (P(), P("x"), P("x", "y"))
    found = spmd.shard_map(body, mesh_of("2x4"), (P(), P("x", "y")), specs)(KEY, x)
    same, own, dropped = (value.full_tensor() for value in found)
    keys = [random.fold_in(KEY, number) for number in range(2)]
    assert torch.equal(random.normal(KEY, (3,)), same)
    assert torch.equal(torch.cat([random.normal(key, (3,)) for key in keys]), own)
    rows = [random.dropout(key, torch.ones(2, 2)).repeat(1, 4)[:, :6] for key in keys]
    assert torch.equal(torch.cat([torch.cat([row[:, :2]] * 3, 1) for row in rows]), dropped)


def test_a_key_varies_where_it_is_folded_with_the_rank():
    def body(key):
        return random.normal(random.fold_in(key, spmd.collectives.axis_index("x")), (3,))

    with pytest.raises(spmd.SpmdError, match="varying"):
        spmd.shard_map(body, mesh_of("2"), P(), P())(KEY)


def test_keys_are_arguments_results_and_closed_over():
    mesh, holder = mesh_of("2x4"), {"key": random.key(1)}

    def step(keys, x):
        key, own = random.split(keys["key"])
        return {"key": key}, x + random.normal(own, (8,)) + random.normal(holder["key"], (8,))

    jitted = spmd.jit(step, (P(), P("x")), (P(), P("y")), mesh=mesh)
    keys, x = {"key": KEY}, torch.zeros(8)
    placed, value = keys, x
    for seed in (1, 2, 2):
        holder["key"] = random.key(seed)
        keys, x = step(keys, x)
        placed, value = jitted(placed, value.redistribute(P("x")) if isinstance(value, spmd.DTensor) else value)
        assert torch.equal(x, value.full_tensor())
    assert torch.equal(keys["key"].data, placed["key"].data.full_tensor())
    assert torch.equal(random.normal(keys["key"], (5,)), random.normal(placed["key"], (5,)).full_tensor())


def test_a_batch_of_keys_is_sharded_as_its_draws_are():
    keys = random.split(KEY, 6)
    draw = torch.func.vmap(lambda key: random.normal(key, (4, 5)))
    jitted = spmd.jit(draw, P("y"), P("y", "x"), mesh=mesh_of("2x4"))
    assert () == jitted.plan(keys).comms
    assert torch.equal(draw(keys), jitted(keys).full_tensor())


@pytest.mark.parametrize("spec", [P("x"), P("y", "x"), P(None, ("x", "y")), P()], ids=str)
def test_dropout_of_a_dtensor(spec):
    x = torch.randn(6, 8, requires_grad=True)
    expected = random.dropout(KEY, x, 0.25)
    placed = spmd.distribute(x.detach(), spec, mesh_of("2x4")).requires_grad_()
    dropped = random.dropout(KEY, placed, 0.25)
    assert torch.equal(expected, dropped.full_tensor())
    expected.square().sum().backward()
    dropped.square().sum().backward()
    assert torch.equal(x.grad, placed.grad.full_tensor())
    with spmd.comms_of() as sent:
        random.dropout(KEY, placed.detach(), 0.25)
    assert not sent.comms


def test_a_rank_holds_its_shard_only():
    peaks = []
    for ranks in (1, 8, 64):
        mesh = spmd.make_mesh({"x": ranks}, runtime="abstract")
        draw = spmd.jit(lambda key: random.dropout(key, torch.ones(4096, 1024)), None, P("x"), mesh=mesh)
        peaks.append(draw.plan(KEY).memory.peak)
    assert peaks[0] / 8 <= peaks[1] <= 1.01 * peaks[0] / 8
    assert peaks[0] / 64 <= peaks[2] <= 1.01 * peaks[0] / 64


@pytest.mark.parametrize(
    ("spec", "is_drawn_sharded"),
    [(P("x"), True), (P("x", None, "y"), True), (P(("y", "x")), True), (P("x", "y"), False), (P(None, "y"), False)],
    ids=str,
)
def test_a_draw_whose_dim_is_split_afterwards(spec, is_drawn_sharded):
    def drop(key, x):
        return random.dropout(key, x.view(-1, 8)).view(x.shape)

    x = torch.ones(7, 3, 8)
    jitted = spmd.jit(drop, (P(), spec), spec, mesh=mesh_of("2x4"))
    assert torch.equal(drop(KEY, x), jitted(KEY, x).full_tensor())
    assert is_drawn_sharded is (" shard(" not in jitted.lower(KEY, x).as_text())


@pytest.mark.parametrize("name", ["permutation", "choice", "categorical", "randint", "bernoulli", "truncated_normal"])
def test_functions_of_draws(name):
    arguments = {
        "permutation": (20,),
        "choice": (torch.arange(20.0), (9,), False),
        "categorical": (torch.arange(45.0).view(9, 5),),
        "randint": ((9,), 0, torch.arange(1, 10)),
        "bernoulli": (torch.linspace(0, 1, 9),),
        "truncated_normal": (-1.0, torch.linspace(0, 1, 9)),
    }
    draw = lambda key: getattr(random, name)(key, *arguments[name])  # noqa: E731
    jitted = spmd.jit(draw, None, P("x"), mesh=mesh_of("3"))
    assert () == jitted.plan(KEY).comms
    assert torch.equal(draw(KEY), jitted(KEY).full_tensor())


def test_processes_draw_what_one_device_draws(on_ranks):
    alone = keyed_cases.draws_on_processes(spmd.make_mesh({"data": 1}, runtime="virtual"))
    assert all(alone == found for found in on_ranks(keyed_cases.draws_on_processes, {"data": 2}))
