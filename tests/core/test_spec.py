import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd.core.mesh import make_mesh
from spmd.core.placement import Partial, Replicate, Shard
from spmd.core.spec import DTensorSpec, P, TensorMeta, chunk_bounds
from spmd.errors import ShardingError
from spmd.testing.strategies import meshes, pspecs, tensor_specs

MESH = make_mesh({"data": 2, "model": 4}, runtime="virtual")
META = TensorMeta((8, 6), torch.float32)


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_bounds_are_those_of_torch_chunk(size, count):
    expected = [chunk.tolist() for chunk in torch.arange(size).chunk(count)] if size else []
    expected += [[]] * (count - len(expected))
    bounds = [chunk_bounds(size, (count,), (index,)) for index in range(count)]
    assert expected == [list(range(*bound)) for bound in bounds]


@given(st.integers(0, 40), st.lists(st.integers(1, 4), max_size=3))
def test_nested_chunk_bounds_are_chunks_of_chunks(size, counts):
    for indices in itertools.product(*map(range, counts)):
        piece = list(range(size))
        for count, index in zip(counts, indices, strict=True):
            length = -(-len(piece) // count)
            piece = piece[index * length : (index + 1) * length]
        start, stop = chunk_bounds(size, counts, indices)
        assert piece == list(range(start, stop))
        assert 0 <= start <= stop <= size


@given(tensor_specs())
def test_shards_tile_the_tensor_exactly(spec):
    """Along sharded axes every element is on one rank; along the others all ranks hold the same."""
    replicas = spec.mesh.size // spec.mesh.axis_size([axis for axes in spec.dims for axis in axes])
    count = torch.zeros(spec.meta.shape, dtype=torch.int64)
    for coordinate in spec.mesh.coordinates():
        part = count[spec.local_slices(coordinate)]
        part += 1
        assert spec.local_shape(coordinate) == tuple(part.shape)
    assert torch.equal(torch.full_like(count, replicas), count)


@given(tensor_specs())
def test_ranks_that_differ_in_axes_that_shard_nothing_hold_the_same_part(spec):
    sharding = {axis for axes in spec.dims for axis in axes}
    others = [axis for axis in spec.mesh.names if axis not in sharding]
    for group in spec.mesh.groups(others):
        assert 1 == len({tuple(map(str, spec.local_slices(spec.mesh.coordinate(rank)))) for rank in group})


def test_shard_order_is_part_of_the_spec():
    """Six elements over 2 x 4: the major axis takes the larger stride."""
    spec = DTensorSpec.make(MESH, P(("model", "data")), TensorMeta((16,), torch.float32))
    other = DTensorSpec.make(MESH, P(("data", "model")), TensorMeta((16,), torch.float32))
    assert [0, 4, 8, 12, 2, 6, 10, 14] == [spec.local_slices(c)[0].start for c in MESH.coordinates()]
    assert [0, 2, 4, 6, 8, 10, 12, 14] == [other.local_slices(c)[0].start for c in MESH.coordinates()]
    assert spec != other


def test_uneven_and_empty_shards():
    spec = DTensorSpec.make(MESH, P("model"), TensorMeta((5,), torch.float32))
    assert [(2,), (2,), (1,), (0,)] == [spec.local_shape((0, index)) for index in range(4)]
    assert (False, True) == (spec.is_even, DTensorSpec.make(MESH, P("model"), META).is_even)
    assert 2 * 4 == spec.local_bytes()


@given(tensor_specs())
def test_the_first_rank_holds_the_largest_shard(spec):
    size = max(torch.Size(spec.local_shape(c)).numel() for c in spec.mesh.coordinates())
    assert size * spec.meta.dtype.itemsize == spec.local_bytes()
    assert spec.is_even == (len({spec.local_shape(c) for c in spec.mesh.coordinates()}) == 1)


@given(tensor_specs())
def test_spec_and_placements_round_trip_where_axes_are_in_mesh_order(spec):
    ordered = DTensorSpec(
        spec.mesh,
        tuple(tuple(sorted(axes, key=spec.mesh.axis_position)) for axes in spec.dims),
        spec.partial,
        spec.meta,
    )
    assert ordered == DTensorSpec.make(spec.mesh, ordered.placements, spec.meta)
    assert ordered.placements == spec.placements == tuple(spec.placement(axis) for axis in spec.mesh.names)


@given(tensor_specs())
def test_specs_are_values(spec):
    same = DTensorSpec.make(make_mesh(spec.mesh.axes, runtime="virtual"), spec.pspec, spec.meta)
    assert (spec, hash(spec)) == (same, hash(same))
    assert spec == pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec)
    assert spec.pspec == eval(repr(spec.pspec)) == pickle.loads(pickle.dumps(spec.pspec))
    assert f"{spec.meta} {spec.pspec}" == str(spec)


@given(st.data(), meshes())
def test_different_specs_differ(data, mesh):
    one, other = (data.draw(pspecs(mesh.names, 2)) for _ in range(2))
    assert (one == other) == (repr(one) == repr(other))


def test_pspecs():
    assert P() == P(None) == P((), []) == P(partial={})
    assert P("data") == P(("data",)) == P(["data"], None)
    assert P(None, "data") != P("data")
    assert P(("data", "model")) != P(("model", "data"))
    assert P(partial={"data": "sum", "model": "sum"}) == P(partial={"model": "sum", "data": "sum"})
    assert hash(P("data")) == hash(P(("data",), None))
    assert "P('data', None, ('x', 'y'), partial={'model': 'sum'})" == repr(
        P("data", None, ("x", "y"), partial={"model": "sum"})
    )


def test_specs_from_placements():
    assert P(("data", "model")) == P.from_placements((Shard(0), Shard(0)), MESH)
    assert P(None, "model", partial={"data": "max"}) == P.from_placements([Partial("max"), Shard(1)], MESH)
    assert P(None, "data") == DTensorSpec.make(MESH, (Shard(-1), Replicate()), META).pspec


def test_replicated():
    spec = DTensorSpec.replicated(MESH, META)
    assert spec == DTensorSpec.make(MESH, P(), META)
    assert spec.is_replicated
    assert not DTensorSpec.make(MESH, P(None, "data"), META).is_replicated
    assert not DTensorSpec.make(MESH, P(partial={"data": "sum"}), META).is_replicated


def test_tensor_meta():
    meta = TensorMeta.of(torch.zeros(8, 6, dtype=torch.bfloat16))
    assert TensorMeta([8, 6], torch.bfloat16) == meta
    assert (2, 48, 96, "bf16[8,6]") == (meta.ndim, meta.numel, meta.nbytes, str(meta))
    assert "float8_e5m2[]" == str(TensorMeta((), torch.float8_e5m2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: P("data", "data"), r"'data' is used twice in P\('data', 'data'\)"),
        (lambda: P(("data", "data")), "'data' is used twice"),
        (
            lambda: P("data", partial={"data": "sum"}),
            "'data' is used twice in P.'data', partial=.*one dim or be partial",
        ),
        (lambda: P(partial={"data": "mean"}), r"partial\['data'\] must be one of sum, max, min \(got 'mean'\)"),
        (lambda: P(partial={"data": "sum", "model": "max"}), "waits for two different reductions"),
        (lambda: P(partial="data"), "partial must map mesh axes to reductions"),
        (lambda: P(3), r"must be an axis name, a tuple of axis names, or None \(got 3\)"),
        (lambda: P(("data", None)), "must be an axis name, a tuple of axis names, or None"),
        (lambda: P(P("data")), "must be an axis name, a tuple of axis names, or None"),
    ],
)
def test_malformed_pspecs(make, text):
    with pytest.raises(ShardingError, match=text):
        make()


@pytest.mark.parametrize(
    ("spec", "meta", "text"),
    [
        (P("tp"), META, r"Unknown mesh axis 'tp' in P\('tp'\): Mesh\(data=2, model=4\) has axes 'data', 'model'"),
        (P(partial={"tp": "sum"}), META, "Unknown mesh axis 'tp'"),
        (P(None, None, "data"), META, r"names 3 dims but the tensor f32\[8,6\] has 2. Shorten the spec"),
        (P("data"), TensorMeta((), torch.float32), r"names 1 dims but the tensor f32\[\] has 0"),
        ((Shard(0),), META, r"one placement for each of the 2 axes of Mesh\(data=2, model=4\) \(got \[Shard\(0\)\]\)"),
        ((Shard(2), Replicate()), META, r"Shard\(2\) in .* shards a dim that the tensor f32\[8,6\] lacks"),
        ((Shard(-3), Replicate()), META, r"Shard\(-3\) in .* shards a dim that the tensor f32\[8,6\] lacks"),
        ((Shard(0), "model"), META, r"placement on mesh axis 'model' must be spmd.Shard, .* \(got 'model'\)"),
        (
            P(partial={"data": "sum"}),
            TensorMeta((4,), torch.bool),
            "cannot be partial over 'data': torch.bool has no sum",
        ),
        (P(partial={"data": "max"}), TensorMeta((4,), torch.complex64), "torch.complex64 has no max"),
    ],
)
def test_specs_that_do_not_fit(spec, meta, text):
    with pytest.raises(ShardingError, match=text):
        DTensorSpec.make(MESH, spec, meta)


def test_placements_alone_cannot_count_from_the_end():
    with pytest.raises(ShardingError, match=r"must not be negative in a spec \(got Shard\(-1\)\)"):
        P.from_placements((Shard(-1), Replicate()), MESH)


def test_specs_are_frozen():
    with pytest.raises(AttributeError):
        P("data").dims = ()
    with pytest.raises(AttributeError):
        DTensorSpec.replicated(MESH, META).dims = ()
