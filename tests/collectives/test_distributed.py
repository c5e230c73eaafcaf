"""The distributed runtime against the virtual one, on processes that are reused from case to case."""

from __future__ import annotations

import itertools
import operator
import re

import distributed_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import product, sample
from workers import WorkerError, Workers

import layouts
from spmd.core.mesh import make_mesh
from spmd.core.spec import TensorMeta
from spmd.optim import adamw, sgd
from spmd.testing import strategies as spmd_strategies


@pytest.mark.parametrize("shape", sample([(8, 4), (5, 2), (3,), (0, 3)], [(5, 2), (3,), (0, 3)]))
def test_every_pair_of_specs_on_four_ranks(workers, shape):
    assert workers.run(cases.redistribute_all_pairs, {"x": 2, "y": 2}, shape, ranks=4)[0] > 100


@pytest.mark.parametrize("axes", [{"x": 4}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize(("length", "dtype"), [(8, torch.float32), (5, torch.float32), (8, torch.bfloat16)], ids=str)
def test_a_reduce_scatter_sums_in_rank_order(workers, axes, length, dtype):
    workers.run(cases.scatter_sums, axes, length, dtype, ranks=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int16], ids=str)
def test_shards_of_any_strides(workers, dtype):
    workers.run(cases.redistribute_strided, dtype, ranks=2)


SIZES = st.sampled_from([0, 1, 3, 5, 7])
DTYPES = [*spmd_strategies.DTYPES, torch.int16, torch.float16, torch.float64, torch.complex64]


@settings(max_examples=200)
@given(data=st.data(), axes=st.sampled_from([{"x": 4}, {"x": 2, "y": 2}, {"x": 1, "y": 4}]))
def test_drawn_pairs_of_uneven_shards(workers, data, axes):
    mesh = make_mesh(axes, runtime="virtual")
    meta = TensorMeta(data.draw(st.lists(SIZES, min_size=1, max_size=3)), data.draw(st.sampled_from(DTYPES)))
    source = data.draw(spmd_strategies.tensor_specs(mesh=mesh, meta=meta))
    target = data.draw(spmd_strategies.tensor_specs(mesh=mesh, meta=meta))
    shards, _ = data.draw(spmd_strategies.shards(source))
    workers.run(cases.redistribute_one, axes, source, target, shards, ranks=4)


RUNS = list(itertools.product(layouts.STRATEGIES, [1, 2, 4, 8], [False, True]))


# What other strategies do on two axes or on one, these do, too.
@pytest.mark.parametrize(
    "run", sample(RUNS, [("dp", 1, False), ("fsdp_tp", 4, False), ("sp", 2, False), ("fsdp", 2, True)])
)
def test_strategies_train_as_on_virtual_ranks(workers, run):
    name, ranks, scan = run
    axes = layouts.STRATEGIES[name].mesh_of(ranks)
    expected, *_ = cases.train(name, axes, "virtual", 5, "cpu", scan)
    results = workers.run(cases.train, name, axes, "distributed", 5, "cpu", scan, ranks=ranks)
    for losses, planned, executed, _ in results:
        assert expected == pytest.approx(losses, abs=1e-6, rel=0)
        for one, other in zip(sorted(planned), sorted(executed), strict=True):
            assert (one.kind, one.ranks) == (other.kind, other.ranks)
            assert one.bytes == pytest.approx(other.bytes, abs=4 * ranks)  # a bucket is divided as a whole


@pytest.mark.parametrize(("shape", "source"), product([(5, 3), (8, 2), (0, 3)], [3, 0]))
def test_one_rank_scatters_to_any_spec(workers, shape, source):
    assert workers.run(cases.scatter_every_spec, {"x": 2, "y": 2}, shape, source, ranks=4)[0] > 20


def test_a_process_holds_its_own_shard(workers):
    workers.run(cases.hold_one_shard, ranks=4)


@pytest.mark.parametrize("source", [0, 3])
def test_distribute_takes_the_tensors_of_one_rank(workers, source):
    workers.run(cases.take_the_tensors_of_one_rank, source, ranks=4)


def test_parts_that_processes_load_are_joined(workers):
    workers.run(cases.load_parts, ranks=4)


TENSOR_ERRORS = {
    "distribute": r"DivergenceError: leaf \['w'\] differs between ranks: f32\[4\] with digest (\w+) on ranks 0, 1, 3; "
    r"f32\[4\] with digest \w+ on rank 2\. Every rank must hold .* spmd\.distribute\(\.\.\., src_rank=0\)",
    "argument": r"DivergenceError: argument 0 differs between ranks: .* on ranks 0, 1, 3; .* on rank 2\.",
    "shape": r"DivergenceError: leaf \['w'\] differs between ranks: f32\[4\] .* on ranks 0, 2, 3; f32\[5\] .* on rank",
    "src_rank": r"MeshError: Rank must be in 0\.\.3 of Mesh\(x=4\) \(got 4\)",
    "no data": r"ShardingError: src_rank=1 must hold tensors with data",
    "meta": r"ShardingError: leaf must be a torch\.Tensor with data \(got a meta tensor\)",
    "from_local": r"ShardingError: the tensor of DTensor\.from_local\(.*: dim 0 has length 2 on ranks 0, 2, 3; "
    r"3 on rank 1\. Joined by P\('x'\) it is 9 long, of which torch\.chunk gives 3 on ranks 0, 1, 2; 0 on rank 3\. ",
    "dtype": r"ShardingError: Shard of rank 3 must be f32\[2\] for a global tensor f32\[8\] .* \(got i64\[2\]\)",
    "parts": r"ShardingError: leaf \['w'\] of from_process_data\(.*: dim 0 has length 2 on ranks 0, 2, 3; 3 on rank 1",
    "meta part": r"ShardingError: leaf \['x'\] must be a torch\.Tensor with data \(got a meta tensor\)",
    "mesh": r"MeshError: argument 0 f32\[4\] is on Mesh\(x=2, y=2\), but the function runs on Mesh\(x=4\)",
    "size": r"MeshError: Mesh\(x=3\) has 3 ranks, but the job has 4 processes\. Choose axes whose product is 4",
    "abstract": r"MeshError: An abstract mesh holds no data",
    "init": r"MeshError: init\(timeout=\.\.\.\) came after torch\.distributed was started",
}


def test_errors_are_the_same_on_every_rank(workers):
    first, *others = workers.run(cases.errors_of_tensors, ranks=4)
    assert all(other == first for other in others)
    assert first.keys() == TENSOR_ERRORS.keys()
    for name, pattern in TENSOR_ERRORS.items():
        assert re.match(pattern, first[name]), first[name]


def test_ranks_that_run_different_programs_say_so(workers):
    for found in workers.run(cases.errors_of_programs, ranks=4):
        assert re.match(
            r"DivergenceError: The program of \S+ differs between ranks in line 5: .* on rank 1\.", found["function"]
        )
        assert re.match(
            r"DivergenceError: The random generator .*: \w+ on ranks 0, 1; \w+ on ranks 2, 3", found["seed"]
        )


@pytest.mark.parametrize("name", cases.PROGRAMS)
def test_programs_do_what_virtual_ranks_do(workers, name):
    workers.run(cases.run_program, name, {"x": 4}, ranks=4)


def test_donated_shards_are_freed(workers):
    workers.run(cases.donate, ranks=2)


def test_donated_shards_are_written_in_place(workers):
    workers.run(cases.write_in_place, ranks=2)


@pytest.mark.parametrize("optimizer", [(adamw, 0.1), (sgd, 0.1, 0.9)])
def test_optimizers_train_in_place(workers, optimizer):
    workers.run(cases.train_in_place, *optimizer, ranks=2)


def test_torchs_dtensor_is_the_same_shards(workers):
    order, virtual, average = workers.run(cases.convert, ranks=4)[0]
    assert re.match(
        r"ShardingError: torch has no placement for dim 0 .* value\.redistribute\(P\(\('x', 'y'\)\)\)", order
    )
    assert re.match(r"MeshError: torch's DTensor needs a distributed mesh \(got Mesh\(x=2\), which is virtual", virtual)
    assert re.match(r"ShardingError: spmd has no placement Partial\(avg\)", average)


def test_a_failure_in_a_worker_is_one_here_and_the_next_call_works(forks):
    with Workers(forks) as workers:
        with pytest.raises(WorkerError, match=r"(?s)rank 0: Traceback .*ZeroDivisionError: .* by zero"):
            workers.run(operator.floordiv, 1, 0, ranks=1)
        assert [3] == workers.run(operator.floordiv, 7, 2, ranks=1)
