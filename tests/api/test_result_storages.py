"""The storages of results: they hold no more than the results, so that whole tensors are freed."""

import pytest
import storage_cases as cases
import torch
from sampling import sample
from workers import call_on_mesh

import layouts
import moe
import ring_attention
import spmd
from spmd import P
from spmd.testing.live import peak_bytes

MESHES = [dict(axes) for axes in dict.fromkeys(tuple(s.mesh_of(2).items()) for s in layouts.STRATEGIES.values())]


@pytest.mark.parametrize(
    ("axes", "shapes"),
    [
        ({"x": 2, "y": 2}, 1),
        pytest.param({"x": 4, "y": 1}, len(cases.SHAPES), marks=pytest.mark.slow),
        pytest.param({"y": 3, "x": 2}, len(cases.SHAPES), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_results_hold_their_own(axes, shapes):
    assert cases.results_hold_their_own(shapes, spmd.make_mesh(axes, runtime="virtual")) > 300 * shapes


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_of_processes_hold_their_own(workers, ranks):
    workers.run(call_on_mesh, cases.results_hold_their_own, {"x": 2, "y": ranks // 2}, "distributed", 1, ranks=ranks)


@pytest.mark.parametrize("axes", sample(MESHES, [{"data": 2}]))
def test_results_of_training_hold_their_own(axes):
    assert cases.examples_hold_their_own(axes, "virtual")


@pytest.mark.slow  # six strategies are compiled on each of two processes
def test_results_of_training_in_processes_hold_their_own(workers):
    for axes in MESHES:
        workers.run(cases.examples_hold_their_own, axes, "distributed", ranks=2)


def test_results_of_other_examples_hold_their_own():
    config = moe.Config(width=4, hidden=6)
    for dispatch in moe.DISPATCHES.values():
        mesh = spmd.make_mesh({moe.AXIS: 4}, runtime="virtual")
        assert 0 == cases.excess(moe.train(mesh, config, dispatch, [moe.make_batch(config, 16, 0)]))
    step = ring_attention.make_step(spmd.make_mesh({"seq": 4}, runtime="virtual"), 10, causal=True)
    qkv = [torch.randn(2, 3, 10, 4) for _ in range(4)]
    assert 0 == cases.excess(step(tuple(qkv[:3]), qkv[3]))


def test_an_initialization_holds_one_whole_tensor(workers):
    """Six shards and, at the last draw, four more of one whole tensor less the shard that is not made yet."""
    virtual = cases.an_initialization_holds_one_whole_tensor(spmd.make_mesh({"x": 2}, runtime="virtual"))
    assert (2 * 6, 6 + 2) == virtual
    found = workers.run(call_on_mesh, cases.an_initialization_holds_one_whole_tensor, {"x": 2}, "distributed", ranks=2)
    assert [(6, 6 + 2)] * 2 == found


FUNCTIONS = {
    "a part": lambda x: x.exp()[:3],
    "a part that is read again": lambda x: (y := x.exp()[:3], y.sin().sum(), x.cos().cos().sum()),
    "parts of one": lambda x: x.exp().split([3, 2, 3])[::2],
    "all of one": lambda x: x.exp().chunk(2),
    "a part of a copy": lambda x: x.exp().t().reshape(-1)[1:],
    "a part of a collective's result": lambda x: spmd.constrain(x.exp(), P())[:3],
    "a part of an argument": lambda x: x[:, 1:3],
    "draws": lambda x: ([torch.randn(8, 4) * 2 for _ in range(3)], x + 1),
    "draws of one dim": lambda x: [torch.randn(8) for _ in range(3)],
}


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_peak_counts_base_and_copy(name, spec):
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    out = P("x") if name.startswith("draws") else None
    step = spmd.jit(FUNCTIONS[name], (spec,), out, mesh=mesh)
    x = spmd.TensorMeta((8, 4), torch.float32)
    assert peak_bytes(step.lower(x)) == step.plan(x).memory.peak


def test_a_view_of_an_argument_stays_one():
    """But not of a donated one, which nobody else holds."""
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    x = spmd.distribute(torch.arange(8.0), P(), mesh)
    kept = spmd.jit(lambda x: x[:2], P(), P(), mesh=mesh)(x)
    assert x.shards[0].data_ptr() == kept.shards[0].data_ptr()
    taken = spmd.jit(lambda x: x[:2], P(), P(), mesh=mesh, donate_argnums=0)(x)
    assert 0 == cases.excess(taken)


def test_a_step_copies_nothing():
    """What a program computes with is a view, also where a slice of it is a result."""
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    step = spmd.jit(lambda x: spmd.constrain(x.exp(), P("x")).sin(), P(), P("x"), mesh=mesh)
    assert "own_memory" not in step.lower(torch.ones(4)).as_text()
