import itertools

import pytest
import torch
from hypothesis import given
from sampling import product
from torch._subclasses.fake_tensor import FakeTensorMode

from spmd.collectives.resharding import eager_redistribution, redistribution
from spmd.collectives.traffic import record_traffic
from spmd.core.mesh import make_mesh
from spmd.core.placement import combine
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.errors import ShardingError
from spmd.runtime.redistribute import redistribute_shards
from spmd.testing import strategies as spmd_strategies
from spmd.testing.specs import every_spec, random_shards

F32 = torch.float32


def check_shards(spec, shards, whole):
    """The shards stand for the whole: right shapes, and right values once partial axes are reduced in plain torch."""
    mesh, axes = spec.mesh, tuple(axis for axis, _ in spec.partial)
    coordinates = list(mesh.coordinates())
    for coordinate, shard in zip(coordinates, shards, strict=True):
        assert spec.local_shape(coordinate) == tuple(shard.shape)
        assert shard.is_contiguous()
    for group in mesh.groups(axes):
        value = shards[group[0]]
        for rank in group[1:]:
            value = combine(spec.partial[0][1], value, shards[rank])
        assert torch.equal(whole[spec.local_slices(coordinates[group[0]])], value)


def check_pair(source, target, generator):
    shards, whole = random_shards(source, generator)
    before = [shard.clone() for shard in shards]
    steps = redistribution(source, target)
    for result in (redistribute_shards(shards, source, target, steps), redistribute_shards(shards, source, target)):
        check_shards(target, result, whole)
    assert all(torch.equal(old, new) for old, new in zip(before, shards, strict=True)), "arguments were changed"
    if steps:
        assert (source, target) == (steps[0].source, steps[-1].target)
    for first, second in itertools.pairwise(steps):
        assert first.target == second.source


MESHES = [{"x": 3}, {"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 3, "y": 3}]


@pytest.mark.parametrize(("shape", "axes"), product([(7,), (12, 6), (5, 2), (1,), (12,), (0, 3)], MESHES))
def test_every_pair_of_specs(shape, axes):
    mesh, generator = make_mesh(axes, runtime="virtual"), torch.Generator().manual_seed(0)
    specs = every_spec(mesh, TensorMeta(shape, F32))
    for source, target in itertools.product(specs, repeat=2):
        check_pair(source, target, generator)


@pytest.mark.parametrize(
    ("axes", "shape"),
    product([{"x": 2, "y": 2, "z": 2}, {"x": 2, "y": 3, "z": 1}, {"x": 3, "y": 2, "z": 2}], [(9, 4), (24,)]),
)
def test_sampled_pairs_on_three_axes(axes, shape):
    mesh, generator = make_mesh(axes, runtime="virtual"), torch.Generator().manual_seed(0)
    specs = every_spec(mesh, TensorMeta(shape, F32))
    choices = torch.randint(len(specs), (200, 2), generator=generator).tolist()
    for source, target in choices:
        check_pair(specs[source], specs[target], generator)


@given(source=spmd_strategies.tensor_specs(), target_data=spmd_strategies.st.data())
def test_drawn_pairs_of_every_dtype(source, target_data):
    target = target_data.draw(spmd_strategies.tensor_specs(mesh=source.mesh, meta=source.meta))
    shards, whole = target_data.draw(spmd_strategies.shards(source))
    check_shards(target, redistribute_shards(shards, source, target), whole)


SHARD0, SHARD1, REPLICATED, SUM, MAX = P("x"), P(None, "x"), P(), P(partial={"x": "sum"}), P(partial={"x": "max"})
SINGLE_STEPS = [
    (SUM, REPLICATED, "all_reduce", 2 * 3 / 4 * 256),
    (MAX, REPLICATED, "all_reduce", 2 * 3 / 4 * 256),
    (SUM, SHARD1, "reduce_scatter", 3 / 4 * 256),
    (SHARD0, REPLICATED, "all_gather", 3 / 4 * 256),
    (SHARD0, SHARD1, "all_to_all", 3 / 4 * 64),
    (REPLICATED, SHARD0, "shard", 0.0),
    (REPLICATED, SUM, "to_partial", 0.0),
]


@pytest.mark.parametrize(("source", "target", "kind", "nbytes"), SINGLE_STEPS, ids=lambda value: str(value))
def test_a_change_along_one_axis_is_one_step_with_the_bytes_of_the_closed_form(source, target, kind, nbytes):
    mesh, meta = make_mesh({"x": 4}, runtime="virtual"), TensorMeta((8, 8), F32)
    (step,) = redistribution(DTensorSpec.make(mesh, source, meta), DTensorSpec.make(mesh, target, meta))
    assert (kind, ("x",), nbytes, nbytes > 0) == (step.kind, step.axes, step.bytes, step.is_collective)


def kinds(source, target, axes, shape):
    mesh, meta = make_mesh(axes, runtime="virtual"), TensorMeta(shape, F32)
    return [str(s) for s in redistribution(DTensorSpec.make(mesh, source, meta), DTensorSpec.make(mesh, target, meta))]


SEQUENCES = [
    (P("x"), P("x"), []),
    (P(partial={"x": "sum", "y": "sum"}), P(), ["all_reduce[x, y]: P(partial={'x': 'sum', 'y': 'sum'}) -> P()"]),
    (P(("x", "y")), P(), ["all_gather[x, y]: P(('x', 'y')) -> P()"]),
    (P(("x", "y")), P("x"), ["all_gather[y]: P(('x', 'y')) -> P('x')"]),
    (P(("x", "y")), P(("y", "x")), ["permute[x, y]: P(('x', 'y')) -> P(('y', 'x'))"]),
    (P("x", "y"), P("y", "x"), ["permute[x, y]: P('x', 'y') -> P('y', 'x')"]),
    (P("x"), P(None, "x"), ["all_to_all[x]: P('x') -> P(None, 'x')"]),
    (P("x"), P("x", "y"), ["shard[y]: P('x') -> P('x', 'y')"]),
    (
        P(partial={"x": "sum"}),
        P("y", partial={"x": "max"}),
        [
            "shard[y]: P(partial={'x': 'sum'}) -> P('y', partial={'x': 'sum'})",
            "all_reduce[x]: P('y', partial={'x': 'sum'}) -> P('y')",
            "to_partial[x]: P('y') -> P('y', partial={'x': 'max'})",
        ],
    ),
    (
        P(partial={"x": "sum"}),
        P(("y", "x")),
        [
            "shard[y]: P(partial={'x': 'sum'}) -> P('y', partial={'x': 'sum'})",
            "reduce_scatter[x]: P('y', partial={'x': 'sum'}) -> P(('y', 'x'))",
        ],
    ),
]


@pytest.mark.parametrize(("source", "target", "expected"), SEQUENCES, ids=lambda value: str(value)[:40])
def test_sequences(source, target, expected):
    assert expected == kinds(source, target, {"x": 2, "y": 2}, (8, 8))


OVER_ANOTHER_DIM = [
    (
        P("y"),
        P(None, ("y", "x")),
        [
            "shard[x]: P('y') -> P(('y', 'x'))",
            "all_to_all[y, x]: P(('y', 'x')) -> P(None, ('y', 'x'))",
        ],
    ),
    (
        P(("x", "y")),
        P(None, "x"),
        [
            "all_to_all[x, y]: P(('x', 'y')) -> P(None, ('x', 'y'))",
            "all_gather[y]: P(None, ('x', 'y')) -> P(None, 'x')",
        ],
    ),
]


@pytest.mark.parametrize(("source", "target", "expected"), OVER_ANOTHER_DIM, ids=lambda value: str(value)[:40])
def test_a_way_over_another_dim_is_taken_where_it_sends_less(source, target, expected):
    assert expected == kinds(source, target, {"x": 2, "y": 2}, (8, 8))


def test_a_way_of_more_collectives_is_not_taken():
    steps = kinds(P(partial={"x": "sum"}), P(), {"x": 4, "y": 2}, (8, 4))  # over y two would send 160 bytes, not 192
    assert ["all_reduce[x]: P(partial={'x': 'sum'}) -> P()"] == steps


def test_outside_of_a_program_an_exchange_may_leave_a_reduction_pending():
    mesh = make_mesh({"x": 2, "y": 2, "z": 2}, runtime="virtual")
    meta = TensorMeta((4096, 1024), torch.float32)
    source, target = (DTensorSpec.make(mesh, p, meta) for p in (P(partial={"x": "sum", "y": "sum"}), P(("x", "z"))))
    assert [
        "exchange[x, y, z]: P(partial={'x': 'sum', 'y': 'sum'}) -> P(('x', 'z'), partial={'y': 'sum'})",
        "all_reduce[y]: P(('x', 'z'), partial={'y': 'sum'}) -> P(('x', 'z'))",
    ] == list(map(str, eager_redistribution(source, target)))


def test_reordering_uneven_chunks_gathers():
    steps = kinds(P(("x", "y")), P(("y", "x")), {"x": 2, "y": 2}, (6, 8))
    assert ["all_gather[x, y]: P(('x', 'y')) -> P()", "shard[y, x]: P() -> P(('y', 'x'))"] == steps


def test_axes_of_size_one_move_nothing():
    assert [] == kinds(P("x", partial={"y": "sum"}), P(None, "x"), {"x": 1, "y": 1}, (6, 8))
    steps = kinds(P("x", partial={"y": "sum"}), P(), {"x": 1, "y": 2}, (6, 8))
    assert ["all_reduce[y]: P('x', partial={'y': 'sum'}) -> P()"] == steps


@pytest.mark.parametrize("axes", [{"x": 3}, {"x": 2, "y": 3}], ids=str)
@pytest.mark.parametrize("shape", [(12, 6), (5, 2)], ids=str)
def test_fake_shapes_are_the_real_ones(axes, shape):
    mesh = make_mesh(axes, runtime="virtual")
    specs = every_spec(mesh, TensorMeta(shape, F32), reductions=("sum",))
    with FakeTensorMode() as mode:
        for source, target in itertools.product(specs[::2], specs[::3]):
            for coordinate in mesh.coordinates():
                x = torch.empty(source.local_shape(coordinate))
                for step in redistribution(source, target):
                    x = step.apply(x, coordinate)
                    assert step.target.local_shape(coordinate) == tuple(x.shape)
                assert mode is x.fake_mode


@pytest.mark.parametrize("axes", [{"x": 4}, {"x": 2, "y": 2}], ids=str)
def test_bytes_of_even_steps_are_the_bytes_that_a_ring_sends(axes):
    mesh, generator = make_mesh(axes, runtime="virtual"), torch.Generator().manual_seed(0)
    specs = every_spec(mesh, TensorMeta((16, 8), F32), reductions=("sum",))
    for source, target in itertools.product(specs, repeat=2):
        shards, _ = random_shards(source, generator)
        with record_traffic() as traffic:
            redistribute_shards(shards, source, target, every := redistribution(source, target))
        steps = [step for step in every if step.is_collective]
        assert [step.kind for step in steps] == [transfer.kind for transfer in traffic.transfers]
        for step, transfer in zip(steps, traffic.transfers, strict=True):
            if step.kind == "permute":  # ranks that keep their piece send nothing
                assert max(transfer.sent) == step.bytes
            else:
                assert {step.bytes} == set(transfer.sent)


def test_bytes_of_an_uneven_all_gather_are_those_of_the_blocks():
    mesh, meta = make_mesh({"x": 4}, runtime="virtual"), TensorMeta((5,), F32)
    source, target = DTensorSpec.make(mesh, P("x"), meta), DTensorSpec.make(mesh, P(), meta)
    shards, _ = random_shards(source, torch.Generator().manual_seed(0))
    with record_traffic() as traffic:
        redistribute_shards(shards, source, target)
    # Blocks of 2, 2, 1 and 0 floats; a rank sends all of them but its right neighbour's.
    assert (12, 16, 20, 12) == traffic.transfers[0].sent
    assert traffic.sent() == traffic.sent("all_gather") == 15.0
    assert 0 == traffic.sent("all_reduce")


def test_planning_does_not_depend_on_the_number_of_ranks():
    mesh, meta = make_mesh({"x": 256, "y": 256}, runtime="abstract"), TensorMeta((65536, 256), F32)
    steps = redistribution(DTensorSpec.make(mesh, P(("x", "y")), meta), DTensorSpec.make(mesh, P("x", "y"), meta))
    assert ["all_to_all"] == [step.kind for step in steps]


def test_different_values_are_refused():
    mesh = make_mesh({"x": 2}, runtime="virtual")
    spec = DTensorSpec.make(mesh, P("x"), TensorMeta((4,), F32))
    with pytest.raises(ShardingError, match=r"not its mesh, shape or dtype .*expected f32\[5\] on Mesh\(x=2\)"):
        redistribution(spec, DTensorSpec.make(mesh, P("x"), TensorMeta((5,), F32)))
    with pytest.raises(ShardingError, match=r"one shard for each of the 2 ranks of Mesh\(x=2\) that .* \(got 1\)"):
        redistribute_shards([torch.zeros(2)], spec, spec)
