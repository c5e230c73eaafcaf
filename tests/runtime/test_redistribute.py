"""Redistribution outside of programs: its cost, between processes, its memory, and between meshes."""

import logging
import re

import pytest
import redistribution_cases as cases
import torch
from sampling import product

import spmd
from proofs.redistribution.sweep import compare, wrong
from spmd import P
from spmd.collectives.block_exchange import BlockExchange
from spmd.core.mesh import make_mesh
from spmd.core.spec import DTensorSpec, TensorMeta

MESHES = [{"x": 4}, {"x": 2, "y": 2}]


@pytest.mark.parametrize(("axes", "shape"), product(MESHES, [(4096, 1024), (16, 8)]))
def test_no_pair_costs_more_than_the_optimum_or_than_torchs(axes, shape):
    logging.getLogger("torch").setLevel(logging.ERROR)
    found = compare(make_mesh(axes, runtime="virtual"), TensorMeta(shape, torch.float32))
    assert 0 == found.above["complete"] == found.above["partial"] == found.dominated == found.against["price", 1]
    assert found.pairs > 2 * found.refused
    if axes == {"x": 4}:
        assert 0 == found.against["bytes", 1] == found.against["count", 1]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_values_and_gradients_of_all_pairs_are_those_of_one_device(axes):
    assert [] == list(wrong(make_mesh(axes, runtime="virtual"), TensorMeta((5, 3), torch.float32)))


@pytest.mark.parametrize(
    ("shape", "axes"), product([(7, 3), (1, 5), (0, 3), (8, 8)], [{"x": 2, "y": 2}, {"x": 4}, {"x": 2}])
)
def test_random_pairs_between_processes(workers, axes, shape):
    ranks = torch.Size(axes.values()).numel()
    found = workers.run(cases.random_pairs, axes, shape, 30, ranks=ranks)
    assert all(0 <= most <= 1 for most in found)


def test_across_meshes(on_ranks):
    on_ranks(cases.cross_meshes, {"x": 4})


def test_ranks_outside_say_where_the_value_is(workers):
    zero, one, two, three = workers.run(cases.stay_outside, ranks=4)
    assert "DTensor(f32[11,5] P('h') on Mesh(h=2, ranks=(3, 1)), shards [5,5])" == one[0]
    assert "DTensor(f32[11,5] P('h') on Mesh(h=2, ranks=(3, 1)), shards [6,5])" == three[0]
    for rank, found in ((0, zero), (2, two)):
        assert "DTensor(f32[11,5] P('h') on Mesh(h=2, ranks=(3, 1)), not on this process)" == found[0]
        for error in found[1:]:
            assert re.search(
                rf"Error: .*[Tt]his process is rank {rank} of the job.*process_index\(\) in mesh\.ranks", error
            )
        assert re.match(r"ShardingError: A DTensor .* after it went to Mesh\(h=2, .*, which has ranks 1, 3; ", found[1])


def test_a_spec_says_its_mesh():
    mesh, other = make_mesh({"x": 4}, runtime="virtual"), make_mesh({"d": 2, "m": 2}, runtime="virtual")
    x = spmd.distribute(torch.arange(8.0), P("x"), mesh)
    spec = DTensorSpec.make(other, P(("d", "m")), TensorMeta((8,), torch.float32))
    with spmd.comms_of(error=True):  # the same blocks on the same ranks
        y = x.redistribute(spec)
    assert (spec, x.shards[3].tolist()) == (y.spec, y.shards[3].tolist())
    with spmd.comms_of() as sent:
        x.redistribute(P("m"), mesh=other)
    assert [("all_to_all", 16.0)] == [(comm.kind, comm.bytes) for comm in sent.comms]
    with pytest.raises(spmd.MeshError, match=r"is on Mesh\(d=2, m=2\), and mesh is Mesh\(x=4\)"):
        x.redistribute(spec, mesh=mesh)
    with pytest.raises(spmd.ShardingError, match=r"got a spec of f32\[8\] for the tensor f32\[4\]"):
        x[:4].redistribute(spec)
    with pytest.raises(spmd.MeshError, match=r"abstract.*one runtime and one kind of device"):
        x.redistribute(P(), mesh=make_mesh({"x": 4}, runtime="abstract"))
    with pytest.raises(spmd.ShardingError, match="Unknown mesh axis 'x'"):
        x.redistribute(P("x"), mesh=other)


def test_an_exchange_sends_what_is_missing_and_shares_it_among_replicas():
    mesh = make_mesh({"x": 2, "y": 2}, runtime="virtual")
    source, target = (DTensorSpec.make(mesh, spec, TensorMeta((8,), torch.float32)) for spec in (P("x"), P()))
    exchange = BlockExchange(source, target)
    assert (16.0, (16, 16, 16, 16), True) == (exchange.bytes, exchange.sent, exchange.is_collective)
    assert "exchange[x, y]: P('x') -> P()" == str(exchange)
    assert not BlockExchange(target, source).is_collective
