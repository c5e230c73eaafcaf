import copy
import io
import pickle
from collections import namedtuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from spmd.api.jit import jit
from spmd.api.values.distribute import distribute, from_process_data, place
from spmd.api.values.dtensor import DTensor, wrap
from spmd.core.mesh import make_mesh, use_mesh
from spmd.core.placement import Partial, Replicate, Shard
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.errors import MeshError, ShardingError
from spmd.testing.strategies import meshes, shards, tensor_specs, tensors

MESH = make_mesh({"data": 2, "model": 3}, runtime="virtual")
ONE = make_mesh({"data": 1}, runtime="virtual")
Pair = namedtuple("Pair", "first second")


def assert_same(expected, actual):
    assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype)
    assert torch.equal(expected, actual)


def small():
    return distribute(torch.arange(35.0).view(5, 7), P("model", "data"), MESH)


@given(st.data(), tensor_specs())
def test_distribute_and_full_tensor_round_trip(data, spec):
    whole = data.draw(tensors(spec.meta))
    value = distribute(whole, spec.pspec, spec.mesh)
    assert spec == value.spec
    assert_same(whole, value.full_tensor())
    for coordinate, shard in zip(spec.mesh.coordinates(), value.shards, strict=True):
        assert spec.local_shape(coordinate) == tuple(shard.shape)
        assert shard.is_contiguous()


@given(st.data(), tensor_specs())
def test_full_tensor_reduces_what_is_partial(data, spec):
    held, whole = data.draw(shards(spec))
    assert_same(whole, DTensor.from_local(held, spec.mesh, spec.pspec, shape=spec.meta.shape).full_tensor())


@pytest.mark.parametrize(("spec", "expected"), [(P(partial={"data": "sum"}), 8), (P(partial={"model": "sum"}), 10)])
def test_replicas_are_not_reduced(spec, expected):
    along_data = spec == P(partial={"data": "sum"})
    held = [torch.tensor([3, 5][row] if along_data else [1, 2, 7][column]) for row, column in MESH.coordinates()]
    assert expected == DTensor.from_local(held, MESH, spec).full_tensor().item()


@given(st.data(), tensor_specs())
def test_from_local_infers_the_shape(data, spec):
    held, _ = data.draw(shards(spec))
    assert spec == DTensor.from_local(held, spec.mesh, spec.pspec).spec


@given(st.data(), meshes())
def test_redistribute_keeps_the_value(data, mesh):
    source = data.draw(tensor_specs(mesh))
    held, whole = data.draw(shards(source))
    target = data.draw(tensor_specs(mesh, source.meta))
    moved = DTensor.from_local(held, mesh, source.pspec, shape=source.meta.shape).redistribute(target.pspec)
    assert target == moved.spec
    assert_same(whole, moved.full_tensor())
    for coordinate, shard in zip(mesh.coordinates(), moved.shards, strict=True):
        assert target.local_shape(coordinate) == tuple(shard.shape)


def test_partial_lies_on_index_0_of_its_axis():
    value = distribute(torch.tensor([1.0, -2.0]), P(partial={"data": "max"}), MESH)
    least = [-torch.inf, -torch.inf]
    assert [[1.0, -2.0]] * 3 + [least] * 3 == [shard.tolist() for shard in value.shards]
    both = distribute(torch.tensor([5]), P(partial={"data": "sum", "model": "sum"}), MESH)
    assert [[5], [0], [0], [0], [0], [0]] == [shard.tolist() for shard in both.shards]


def test_a_dtensor_looks_like_its_global_tensor():
    value = small()
    assert (5, 7) == tuple(value.shape) == tuple(value.size())
    assert (2, 35, 5, torch.float32, torch.device("cpu")) == (
        value.ndim,
        value.numel(),
        len(value),
        value.dtype,
        value.device,
    )
    assert (MESH, (Shard(1), Shard(0))) == (value.mesh, value.placements)
    assert not value.requires_grad
    assert value.grad is None
    assert isinstance(value, torch.Tensor)


def test_repr():
    assert "DTensor(f32[5,7] P('model', 'data') on Mesh(data=2, model=3), shards 2x[2,4] [1,4] 2x[2,3] [1,3])" == repr(
        small()
    )
    assert "DTensor(f32[] P() on Mesh(data=1), shards [])" == repr(distribute(torch.tensor(1.0), P(), ONE))


def test_shards_are_copies():
    whole = torch.ones(4, 2)
    for spec in (P(), P("data")):
        value = distribute(whole, spec, ONE)
        value.to_local().add_(1)
        assert torch.equal(torch.ones(4, 2), whole)
    replicated = distribute(whole, P(), MESH)
    assert 6 == len({shard.data_ptr() for shard in replicated.shards})


def test_full_tensor_is_a_copy():
    value = distribute(torch.zeros(2), P(), ONE)
    value.full_tensor().add_(1)
    assert [0.0, 0.0] == value.full_tensor().tolist()


def test_gradients_do_not_flow_through_distribute():
    weight = torch.nn.Parameter(torch.ones(2))
    value = distribute(weight, P(), ONE)
    assert not value.requires_grad
    assert not value.to_local().requires_grad


@pytest.mark.parametrize("spec", [P(), P("model"), P(None, "data"), P(("data", "model")), P(partial={"data": "sum"})])
@pytest.mark.parametrize("shape", [(6, 4), (5, 3), (1, 2), (0, 3)])
def test_gradients_reach_what_a_distributed_tensor_was_computed_from(spec, shape):
    def loss(w, place):
        return (place(w.square()) * place((w + 1).sin())).sum()

    w = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(loss(w, lambda x: x), w, create_graph=True)
    found = torch.autograd.grad(
        loss(w, lambda x: distribute({"x": x}, spec, MESH)["x"]).full_tensor(), w, create_graph=True
    )
    torch.testing.assert_close(found, expected)
    again = [torch.autograd.grad((first * w.cos()).sum(), w)[0] for (first,) in (expected, found)]
    torch.testing.assert_close(again[1], again[0])


def test_without_autograd_nothing_is_recorded():
    computed = torch.ones(4, requires_grad=True) * 2
    with torch.no_grad():
        assert not distribute(computed, P("model"), MESH).requires_grad
    assert not from_process_data(computed.detach(), P("model"), MESH).requires_grad
    assert from_process_data(computed, P("model"), MESH).requires_grad


@pytest.mark.parametrize("make", [distribute, from_process_data])
def test_a_derivative_that_shards_would_lose_is_refused(make):
    def loss(x):
        return make(x * 2, P("model"), MESH).full_tensor().sum()

    x = torch.randn(4)
    for call in (
        lambda: torch.func.grad(loss)(x),
        lambda: torch.func.jvp(loss, (x,), (x,)),
        lambda: torch.func.vmap(loss)(torch.ones(2, 4)),
    ):
        with pytest.raises(
            ShardingError, match=r"torch\.func or forward-mode AD acts on; its derivative would be lost"
        ):
            call()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ShardingError, match="derivative would be lost"):
        loss(torch.autograd.forward_ad.make_dual(x, x))
    assert torch.equal(torch.ones(4), torch.func.grad(lambda y: y.sum() + loss(x))(x))  # it does not depend on y


def test_a_gradient_does_not_come_back_from_src_rank():
    w = {"w": torch.ones(4, requires_grad=True) * 2}
    with pytest.raises(ShardingError, match=r"leaf \['w'\] was computed by autograd, .* Pass \['w'\].detach\(\)"):
        distribute(w, P("model"), MESH, src_rank=0)


def test_distribute_places_trees():
    tree = {"w": torch.ones(6, 2), "pair": Pair(torch.ones(3), None)}
    placed = distribute(tree, {"w": P("model"), "pair": P()}, MESH)
    assert (P("model"), P(), None) == (placed["w"].spec.pspec, placed["pair"].first.spec.pspec, placed["pair"].second)
    with use_mesh(MESH):
        assert P("data") == distribute(torch.ones(6), (Shard(0), Replicate())).spec.pspec


def test_distribute_takes_arrays_as_jit_does():
    mesh = make_mesh({"data": 2}, runtime="virtual")
    array = numpy.arange(6.0).reshape(3, 2)[::-1]
    tree = {"x": array, "scalar": numpy.float32(2), "number": 0.5}
    placed = distribute(tree, P("data"), mesh)
    taken = jit(lambda tree: tree, ({"x": P("data"), "scalar": P("data"), "number": None},), mesh=mesh)(tree)
    assert torch.equal(placed["x"].full_tensor(), torch.tensor(array.copy())) and placed["x"].dtype == torch.float64
    assert type(placed["scalar"]) is type(taken["scalar"]) is float and placed["number"] == 0.5
    array[:] = 0
    assert placed["x"].sum() == 15
    assert torch.equal(from_process_data(numpy.ones(4), P("data"), mesh).full_tensor(), torch.ones(4).double())
    with pytest.raises(ShardingError, match="leaf is no tensor"):
        distribute(numpy.array(["a"]), P(), mesh)


def test_distribute_redistributes_dtensors():
    value = distribute(torch.arange(5), P("model"), MESH)
    assert distribute(value, P("model"), MESH) is value
    moved = distribute([value], P("data"), MESH)[0]
    assert P("data") == moved.spec.pspec
    assert_same(torch.arange(5), moved.full_tensor())


@pytest.mark.parametrize(
    ("tree", "specs", "text"),
    [
        ({"w": torch.ones(3)}, {"v": P()}, r"specs does not fit the tree: .*keys 'w' \(got a dict with keys 'v'\)"),
        ({"w": torch.ones(3)}, P("tp"), r"leaf \['w'\] f32\[3\]: Unknown mesh axis 'tp'"),
        ({"w": torch.ones(3)}, P("data", "model"), r"leaf \['w'\] f32\[3\]: P\('data', 'model'\) names 2 dims"),
        ({"w": 3}, P(), r"leaf \['w'\] is no tensor \(got int 3\). Pass a tensor"),
        (TensorMeta((), torch.int64), P(), r"leaf must be a torch.Tensor with data \(got TensorMeta\)"),
        ([torch.empty(2, device="meta")], P(), r"leaf 0 must be a torch.Tensor with data \(got a meta tensor\)"),
        (torch.ones(2) > 0, P(partial={"data": "sum"}), "leaf b8.2.: .*torch.bool has no sum"),
    ],
)
def test_distribute_refuses(tree, specs, text):
    with pytest.raises(ShardingError, match=text):
        distribute(tree, specs, MESH)


def test_meshes_must_be_there_and_agree():
    value = distribute(torch.ones(2), P(), ONE)
    with pytest.raises(MeshError, match=r"leaf f32\[2\] P\(\) is on Mesh\(data=1\) and not on Mesh\(data=2, model=3\)"):
        distribute(value, P(), MESH)
    with pytest.raises(MeshError, match="No mesh was given"):
        distribute(torch.ones(2), P())
    with pytest.raises(MeshError, match=r"abstract mesh holds no data .*Mesh\(data=8\)"):
        distribute(torch.ones(2), P(), make_mesh({"data": 8}, runtime="abstract"))


@pytest.mark.parametrize(
    ("held", "spec", "shape", "text"),
    [
        ([torch.ones(2)] * 5, P(), None, r"one shard for each of the 6 ranks of Mesh\(data=2, model=3\) .*\(got 5\)"),
        (torch.ones(2), P(), None, r"\(got 1\)"),
        (
            [torch.ones(2)] * 6,
            P("model"),
            (5,),
            r"Shard of rank 2 must be f32\[1\] for .* f32\[5\] P\('model'\) .*f32\[2\]",
        ),
        (
            [torch.ones(2)] * 5 + [torch.ones(2).int()],
            P(),
            None,
            r"Shard of rank 5 must be f32\[2\] .*\(got i32\[2\]\)",
        ),
        ([torch.ones(2)] * 3 + [torch.ones(())] * 3, P("data"), None, r"Shard of rank \d must be"),
        ([torch.ones(2)] * 5 + [3], P(), None, r"Shard of rank 5 must be a plain torch.Tensor \(got int\)"),
        ([torch.ones(2)] * 5 + [torch.ones(2, device="meta")], P(), None, "rank 5 must be on cpu .got meta."),
        ([torch.ones(2)] * 6, P("tp"), None, "Unknown mesh axis 'tp'"),
        ([torch.ones(2)] * 6, P("model"), (5, 1), r"Shard of rank 0 must be f32\[2,1\]"),
    ],
)
def test_from_local_refuses(held, spec, shape, text):
    with pytest.raises(ShardingError, match=text):
        DTensor.from_local(held, MESH, spec, shape=shape)


def test_to_local():
    assert_same(torch.ones(3), DTensor.from_local(torch.ones(3), ONE, (Shard(0),)).to_local())
    with pytest.raises(ShardingError, match=r"\(got 6 ranks on Mesh\(data=2, model=3\)\). Use .shards\[rank\]"):
        small().to_local()


def test_redistribute_refuses_what_does_not_fit():
    with pytest.raises(ShardingError, match=r"the tensor f32.5,7.: Unknown mesh axis 'tp'"):
        small().redistribute(P("tp"))
    with pytest.raises(ShardingError, match="one placement for each of the 2 axes"):
        small().redistribute((Partial(),))


def test_replicated_scalars_are_numbers():
    value = distribute(torch.tensor(2.5), P(), MESH)
    assert (2.5, 2.5, 2, True, "2.50") == (value.item(), float(value), int(value), bool(value), f"{value:.2f}")
    assert 7 == distribute(torch.tensor([7]), P(), MESH).item()


@pytest.mark.parametrize("spec", [P("data"), P(partial={"data": "sum"})])
def test_other_values_are_assembled(spec):
    value = distribute(torch.ones(1), spec, MESH)
    assert (1.0, True, 1) == (float(value), bool(value), value.item())


@pytest.mark.parametrize("name", ["data_ptr", "share_memory_", "__dlpack__"])
def test_methods_that_reach_for_storage_are_refused(name):
    with pytest.raises(ShardingError, match=rf"{name}\(\) was called on DTensor.*\.full_tensor\(\)"):
        getattr(small(), name)()


def test_the_constructor_is_refused():
    with pytest.raises(TypeError, match=r"made by spmd.distribute"):
        DTensor(torch.ones(2))


def test_detach_is_the_same_value():
    value = small()
    detached = value.detach()
    assert (DTensor, value.spec, value.shards) == (type(detached), detached.spec, detached.shards)


def save_and_load(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), save_and_load])
def test_copies(again):
    value = small()
    other = again(value)
    assert type(other) is DTensor
    assert value.spec == other.spec
    assert_same(value.full_tensor(), other.full_tensor())


def test_a_deep_copy_shares_nothing_and_keeps_identity():
    value = small()
    first, second = copy.deepcopy([value, value])
    assert first is second
    assert not {shard.data_ptr() for shard in value.shards} & {shard.data_ptr() for shard in first.shards}


def test_wrap_and_place_are_the_ways_of_the_transforms():
    spec = DTensorSpec.make(ONE, P("data"), TensorMeta((2,), torch.float32))
    shard = torch.ones(2)
    assert wrap(spec, (shard,)).to_local() is shard
    placed = place(shard, spec)
    assert spec == placed.spec
    assert place(placed, spec) is placed


@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P(partial={"data": "sum"})])
@pytest.mark.parametrize("move", [lambda x: x.redistribute(P("model")), DTensor.full_tensor])
def test_a_gradient_through_a_move_has_the_spec_of_its_tensor(move, spec):
    x = distribute(torch.arange(12.0).view(3, 4), spec, MESH).requires_grad_()
    (move(x) ** 2).sum().backward()
    assert_same(2 * x.detach().full_tensor(), x.grad.full_tensor())
    assert x.spec.complete == x.grad.spec


WEIGHT, ADDEND = torch.arange(10.0).view(5, 2), torch.ones(2, 5, 7)
LOSSES = {
    "a sum": lambda x, put: x.sum(),
    "a mean": lambda x, put: x.mean(),
    "a broadcast": lambda x, put: (x + put(ADDEND)).square().sum(),
    "a product": lambda x, put: (x.T @ put(WEIGHT)).sum(),
    "a row": lambda x, put: x[3].sum(),
    "several uses": lambda x, put: x.sum() + (x.T @ put(WEIGHT)).square().sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize(
    "spec", [P(), P("model", "data"), P(("data", "model")), P("model", partial={"data": "sum"})], ids=repr
)
def test_the_gradient_of_a_leaf_has_its_spec(loss, spec):
    whole = torch.arange(35.0).view(5, 7).requires_grad_()
    x = distribute(whole.detach(), P(), MESH).redistribute(spec).requires_grad_()
    for _ in range(2):  # the second gradient is accumulated
        loss(whole, lambda value: value).backward()
        loss(x, lambda value: distribute(value, P("data"), MESH)).backward()
        assert x.spec.complete == x.grad.spec
        torch.testing.assert_close(whole.grad, x.grad.full_tensor())
    (found,) = torch.autograd.grad(x.sum(), x)
    assert x.spec.complete == found.spec


@pytest.mark.parametrize(
    "leaf",
    [
        lambda x: torch.nn.Parameter(x),
        lambda x: copy.deepcopy(torch.nn.Parameter(x)),
        lambda x: pickle.loads(pickle.dumps(x.requires_grad_())),
        lambda x: setattr(x, "requires_grad", True) or x,
        lambda x: x.requires_grad_().requires_grad_(False).requires_grad_(),
    ],
    ids=["parameter", "copy", "pickle", "attribute", "twice"],
)
def test_every_leaf_has_a_gradient_of_its_spec(leaf):
    x = leaf(distribute(torch.arange(35.0).view(5, 7), P("model", "data"), MESH))
    (2 * x).sum().backward()
    assert x.is_leaf and x.spec == x.grad.spec
    assert_same(torch.full((5, 7), 2.0), x.grad.full_tensor())


def test_a_gradient_has_the_spec_of_the_data_that_a_leaf_was_given_last():
    x = torch.nn.Parameter(small())
    x.data = small().redistribute(P("data"))
    x.sum().backward()
    assert P("data") == x.grad.spec.pspec


def test_the_gradient_of_a_leaf_is_differentiable():
    x = small().requires_grad_()
    (first,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_same(6 * torch.arange(35.0).view(5, 7), second.full_tensor())
    assert x.spec == first.spec == second.spec


def test_gradients_of_the_shards_of_another_reduction_are_refused():
    parts = [torch.ones(2, requires_grad=True) for _ in range(6)]
    largest = DTensor.from_local(parts, MESH, P(partial={"data": "max"}))
    with pytest.raises(ShardingError, match="Only sums have one"):
        largest.sum().backward()


def test_shards_may_be_fake_tensors():
    with FakeTensorMode():
        shards = [torch.empty(2, 3), torch.empty(1, 3)]
        found = DTensor.from_local(shards, make_mesh({"data": 2}, runtime="virtual"), P("data"))
    assert (3, 3) == found.shape and isinstance(found.shards[1], FakeTensor)
