"""Bytes of the rank that sends most, against what the virtual runtime plays through on all ranks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.collectives.primitives import KINDS, PERMUTE
from spmd.collectives.primitives.chunks import chunk_lengths
from spmd.collectives.resharding import eager_redistribution, redistribution
from spmd.collectives.traffic import record_traffic
from spmd.core.mesh import make_mesh
from spmd.core.spec import DTensorSpec, P, TensorMeta, chunk_bounds
from spmd.runtime.redistribute import redistribute_shards
from spmd.testing.strategies import meshes, shards, tensor_specs

F32 = torch.float32


def planned(source: P, target: P, shape: tuple[int, ...], **axes: int) -> list[tuple[str, float]]:
    """Kinds and bytes of the collectives from one spec to another, which are those that run."""
    mesh, meta = make_mesh(axes, runtime="virtual"), TensorMeta(shape, F32)
    specs = [DTensorSpec.make(mesh, spec, meta) for spec in (source, target)]
    held = [torch.zeros(specs[0].local_shape(coordinate)) for coordinate in mesh.coordinates()]
    with record_traffic() as traffic:
        redistribute_shards(held, *specs, steps := redistribution(*specs))
    found = [(step.kind, step.bytes) for step in steps if step.is_collective]
    assert [(transfer.kind, max(transfer.sent)) for transfer in traffic.transfers] == found
    return found


PARTIAL = P(partial={"x": "sum"})


@pytest.mark.parametrize(
    ("length", "floats"),
    [(8, 12), (5, 9), (4, 6), (1, 2), (0, 0)],  # blocks 2 2 2 2, 2 2 1 0, 1 1 1 1, 1 0 0 0: twice, but the last two
)
def test_an_uneven_all_reduce(length, floats):
    assert [("all_reduce", floats * 4)] == planned(PARTIAL, P(), (length,), x=4)


@pytest.mark.parametrize(("length", "rows"), [(8, 6), (7, 6), (5, 5), (3, 3), (1, 1), (0, 0)])
def test_an_uneven_all_gather_and_reduce_scatter_send_all_but_the_smallest_block(length, rows):
    assert [("all_gather", rows * 3 * 4)] == planned(P("x"), P(), (length, 3), x=4)
    assert [("reduce_scatter", rows * 3 * 4)] == planned(PARTIAL, P("x"), (length, 3), x=4)


def test_the_smallest_block_of_nested_chunks_need_not_be_the_last():
    """7 in two chunks 4, 3, each in three: 2 2 0 1 1 1."""
    assert [("all_gather", 7 * 4)] == planned(P(("x", "y")), P(), (7,), x=2, y=3)


@pytest.mark.parametrize(
    ("shape", "floats"),
    [
        ((8, 4), 2 * 3),
        ((5, 4), 2 * 3),  # two of the rows, but for one of the columns
        ((5, 5), 2 * 3),  # rows 2 2 1 0 times columns that are not 2 2 1 0
        ((4, 1), 1 * 1),  # ranks 1 to 3 send their row's only column
        ((1, 4), 1 * 3),
        ((1, 1), 0),  # the rank that has it keeps it
        ((0, 4), 0),
    ],
)
def test_an_uneven_all_to_all_sends_all_but_the_own_piece(shape, floats):
    assert [("all_to_all", floats * 4)] == planned(P("x"), P(None, "x"), shape, x=4)


def test_an_all_to_all_sends_most_where_the_largest_shard_is_not():
    """13 rows are 7 and 6 along y; along x these are 3 3 1 and 2 2 2, of columns that become 1 1 0."""
    found = planned(P(("y", "x")), P("y", "x"), (13, 2), x=3, y=2)
    assert [("all_to_all", 4 * 4)] == found


@pytest.mark.parametrize(("columns", "held"), [(4, 2), (3, 2), (1, 1), (0, 0)])
def test_a_permute_sends_the_largest_piece(columns, held):
    found = planned(P(("x", "y"), "z"), P(("y", "x"), "z"), (4, columns), x=2, y=2, z=2)
    assert [("permute", held * 4)] == found


def test_a_permute_in_which_nobody_sends():
    assert 12 == PERMUTE.most_bytes_sent((2,), (3,), 4, ([-1, 0], [3]))
    assert 0 == PERMUTE.most_bytes_sent((2,), (3,), 4, ([0, -1], [3]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [(4,), (2, 2), (1,)], ids=str)
def test_even_chunks_are_the_closed_form(kind, counts):
    n = math.prod(counts)
    shape, args = KINDS[kind].example(n, 32)
    assert KINDS[kind].ring_bytes(n, 4 * math.prod(shape)) == KINDS[kind].most_bytes_sent(counts, shape, 4, args)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=2), st.lists(st.integers(1, 5), max_size=3))
def test_few_chunks_stand_for_all(sizes, counts):
    every = {
        tuple(stop - start for start, stop in (chunk_bounds(size, counts, index) for size in sizes))
        for index in itertools.product(*map(range, counts))
    }
    assert every == chunk_lengths(tuple(sizes), tuple(counts))


@pytest.mark.parametrize("find", [redistribution, eager_redistribution])
@settings(max_examples=200)
@given(data=st.data())
def test_bytes_of_steps_are_those_of_the_rank_that_sends_most(find, data):
    mesh = data.draw(meshes(max_size=4))
    meta = TensorMeta(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)), F32)
    source, target = (data.draw(tensor_specs(mesh=mesh, meta=meta)) for _ in range(2))
    held, _ = data.draw(shards(source))
    with record_traffic() as traffic:
        redistribute_shards(held, source, target, every := find(source, target))
    steps = [step for step in every if step.is_collective]
    assert [(step.kind, step.axes, step.bytes) for step in steps] == [
        (transfer.kind, transfer.axes, max(transfer.sent)) for transfer in traffic.transfers
    ]


MOVES = [(P("x"), P()), (PARTIAL, P("x")), (PARTIAL, P()), (P("x"), P(None, "x")), (P(("x", "y")), P())]


@pytest.mark.parametrize(("source", "target"), MOVES, ids=str)
def test_no_number_of_ranks_is_too_many(source, target):
    mesh, meta = make_mesh({"x": 10**12, "y": 4}, runtime="abstract"), TensorMeta((10**13 + 7, 10**9), F32)
    steps = redistribution(DTensorSpec.make(mesh, source, meta), DTensorSpec.make(mesh, target, meta))
    assert 0 < sum(step.bytes for step in steps)
