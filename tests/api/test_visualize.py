"""`spmd.visualize` of what users hold; values show themselves in notebooks, without communication."""

import pytest
import torch

import spmd
from spmd import P

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")


@pytest.fixture
def value():
    return spmd.distribute(torch.arange(20.0).reshape(5, 4), P("data", "model"), MESH)


def test_a_value_its_spec_and_its_parts_look_alike(value):
    shown = str(spmd.visualize(value))
    assert shown == str(spmd.visualize(value.spec))
    assert shown == str(spmd.visualize(P("data", "model"), shape=(5, 4), mesh=MESH))
    with spmd.use_mesh(MESH):
        assert shown == str(spmd.visualize((spmd.Shard(0), spmd.Shard(1)), shape=(5, 4)))
    assert str(MESH.picture) == str(spmd.visualize(MESH))


def test_notebooks_show_values_specs_and_meshes_without_moving_anything(value):
    with spmd.comms_of(error=True):
        shown = value._repr_html_()
    assert repr(value).replace("'", "&#x27;") in shown
    for item in (value.spec, MESH):
        assert "<svg " in item._repr_html_()


def test_a_donated_value_still_shows_its_sharding(value):
    double = spmd.jit(lambda x: x + x, P("data", "model"), P("data", "model"), mesh=MESH, donate_argnums=0)
    double(value)
    assert "donated" in value._repr_html_()


def test_parameters_and_gradients_show_themselves(value):
    parameter = torch.nn.Parameter(value)
    assert "<svg " in (parameter * 2)._repr_html_()
    assert "<svg " in parameter._repr_html_()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (torch.ones(2), r"visualize takes a DTensor, a DTensorSpec or a mesh \(got a Tensor\). Place a tensor first"),
        (P("data"), r"got P\('data'\) without a shape\). Give the tensor's shape"),
    ],
)
def test_what_has_no_sharding_is_refused(what, message):
    with pytest.raises(spmd.ShardingError, match=message):
        spmd.visualize(what)


def test_names_of_jax_are_the_same_objects():
    assert spmd.PartitionSpec is P
    step = spmd.jit(lambda x: x * 2, in_shardings=(P("data"),), out_shardings=P("data"), mesh=MESH)
    assert P("data") == step(torch.ones(4)).spec.pspec


def test_stages_show_themselves_in_notebooks():
    step = spmd.jit(lambda x, w: torch.relu(x @ w), (P(None, "model"), P("model")), P(), mesh=MESH)
    args = torch.ones(4, 4), torch.ones(4, 2)
    program = step.lower(*args)._repr_html_()
    assert 1 == program.count("background: #f5851840") == len(step.lower(*args).collectives)
    assert "relu_1 = relu(all_reduce_1)" in program
    assert "aten.relu.default" in step.trace(*args)._repr_html_()
    assert "relu_1 = relu(all_reduce_1)" in step.compile(*args)._repr_html_()
