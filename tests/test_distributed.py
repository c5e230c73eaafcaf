"""The distributed runtime against the virtual one, on processes that are reused from case to case."""

from __future__ import annotations

import distributed_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layouts
from spmd.mesh import make_mesh
from spmd.spec import TensorMeta
from spmd.testing import strategies as spmd_strategies


@pytest.mark.parametrize("shape", [(8, 4), (5, 2), (3,), (0, 3)], ids=str)
def test_every_pair_of_specs_on_four_ranks(workers, shape):
    assert workers.run(cases.redistribute_all_pairs, {"x": 2, "y": 2}, shape, ranks=4)[0] > 100


SIZES = st.sampled_from([0, 1, 3, 5, 7])
DTYPES = [*spmd_strategies.DTYPES, torch.int16, torch.float16, torch.float64, torch.complex64]


@settings(max_examples=60)
@given(data=st.data(), axes=st.sampled_from([{"x": 4}, {"x": 2, "y": 2}, {"x": 1, "y": 4}]))
def test_drawn_pairs_of_uneven_shards(workers, data, axes):
    mesh = make_mesh(axes, runtime="virtual")
    meta = TensorMeta(data.draw(st.lists(SIZES, min_size=1, max_size=3)), data.draw(st.sampled_from(DTYPES)))
    source = data.draw(spmd_strategies.tensor_specs(mesh=mesh, meta=meta))
    target = data.draw(spmd_strategies.tensor_specs(mesh=mesh, meta=meta))
    shards, _ = data.draw(spmd_strategies.shards(source))
    workers.run(cases.redistribute_one, axes, source, target, shards, ranks=4)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", list(layouts.STRATEGIES))
def test_strategies_train_as_on_virtual_ranks(workers, name, ranks):
    axes = layouts.STRATEGIES[name].mesh_of(ranks)
    expected, *_ = cases.train(name, axes, "virtual", 5)
    results = workers.run(cases.train, name, axes, "distributed", 5, ranks=ranks)
    for losses, planned, executed, _ in results:
        assert expected == pytest.approx(losses, abs=1e-6, rel=0)
        assert sorted(planned) == sorted(executed)
