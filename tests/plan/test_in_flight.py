"""Memory of the buffers of collectives under way."""

from types import SimpleNamespace

import memory_cases as cases
import pytest
import torch
from workers import call_on_mesh

import spmd
from spmd.core.spec import TensorMeta
from spmd.ir.graph import Operation, Value
from spmd.plan.local.strided import Strided, StridedCall
from spmd.plan.memory.launch_buffers import launch_buffers

F32 = torch.float32

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
spmd_ops = SimpleNamespace(**{name: getattr(torch.ops.spmd, name).default for name in NAMES})


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_limit_makes_plans_synchronous(workers, ranks):
    workers.run(call_on_mesh, cases.a_limit_makes_plans_synchronous, {"data": ranks}, "distributed", ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_buffers_count(workers, ranks):
    workers.run(call_on_mesh, cases.buffers_count, {"data": ranks}, "distributed", ranks=ranks)


def call_of(op, operand, result, *arguments, strides=None):
    meta = TensorMeta(operand, F32)
    layout = Strided.contiguous(meta) if strides is None else Strided(meta, strides)
    x, y = Value("x", meta), Value("y", TensorMeta(result, F32))
    return StridedCall.of(Operation(op, (x, *arguments, ["x"]), {}, (y,)), [layout])


def numels(*calls, ranks=((0,), (1,))):
    """The numbers of elements that a rank allocates when it packs, for the launch itself, and when it unpacks."""
    found = launch_buffers(spmd.make_mesh({"x": 2}, runtime="abstract"), ranks, calls)
    operands = range(len(calls))
    packed, unpacked = (
        [found.metas[number].numel for _, writes in allocations for number in writes]
        for allocations in (found.packing, found.unpacking)
    )
    received = found.received not in (*operands, found.sent)
    return packed, [found.metas[found.received].numel] * received, unpacked


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (call_of(spmd_ops.all_reduce, (6, 2), (6, 2), "sum"), ([], [12], [])),
        (call_of(spmd_ops.all_reduce, (6, 2), (6, 2), "sum", strides=(1, 6)), ([12], [12], [])),
        (call_of(spmd_ops.all_gather, (2, 3), (4, 3), 0, 4), ([], [12], [])),
        (call_of(spmd_ops.all_gather, (3, 2), (3, 4), 1, 4), ([], [12], [12])),
        (call_of(spmd_ops.all_gather, (3, 3), (5, 3), 0, 5), ([], [18], [15])),
        (call_of(spmd_ops.reduce_scatter, (4, 3), (2, 3), "sum", 0, 2), ([], [12], [6])),
        (call_of(spmd_ops.reduce_scatter, (3, 4), (3, 2), "sum", 1, 2), ([12], [12], [6])),
        (call_of(spmd_ops.reduce_scatter, (5, 3), (3, 3), "sum", 0, 3), ([15], [18], [9])),
        (call_of(spmd_ops.all_to_all, (4, 3), (2, 6), 0, 1, 2, 6), ([], [12], [12])),
        (call_of(spmd_ops.all_to_all, (3, 4), (6, 2), 1, 0, 2, 6), ([12], [12], [])),
        (call_of(spmd_ops.permute, (4,), (4,), [-1, 0], [4]), ([], [4], [])),
    ],
    ids=lambda value: f"{value.form.op}{value.operands[0].meta}" if isinstance(value, StridedCall) else "",
)
def test_what_a_rank_of_two_allocates_for_a_collective(call, expected):
    assert expected == numels(call)


def test_what_a_rank_of_two_allocates_for_a_bucket():
    gather = call_of(spmd_ops.all_gather, (2, 3), (4, 3), 0, 4)
    assert ([12], [24], [12, 12]) == numels(gather, gather)
    reduce = call_of(spmd_ops.all_reduce, (4,), (4,), "sum")
    assert ([8], [], []) == numels(reduce, reduce)
    scatter = call_of(spmd_ops.reduce_scatter, (5, 3), (3, 3), "sum", 0, 3)
    assert ([15, 15, 30], [36], [9, 9]) == numels(scatter, scatter)
    exchange = call_of(spmd_ops.all_to_all, (4, 3), (2, 6), 0, 1, 2, 6)
    assert ([24], [24], [12, 12]) == numels(exchange, exchange)
    uneven = call_of(spmd_ops.all_to_all, (3, 3), (2, 5), 0, 1, 2, 5)
    assert ([9, 9, 18], [20], [10, 10, 10, 10]) == numels(uneven, uneven)


def test_a_call_unpacks_as_much_in_every_bucket():
    gather = call_of(spmd_ops.all_gather, (3, 2), (3, 4), 1, 4)
    small, large = (call_of(spmd_ops.all_gather, (1, size), (1, 2 * size), 1, 2 * size) for size in (1, 100))
    for calls in ((gather,), (small, gather), (gather, large, gather), (large, small)):
        unpacked = [12 if call is gather else 2 if call is small else 200 for call in calls]
        assert unpacked == numels(*calls)[2]


def test_chunks_in_another_order_than_the_ranks_are_packed():
    mesh = spmd.make_mesh({"x": 2, "y": 2}, runtime="abstract")
    meta = TensorMeta((4,), F32)
    call = Operation(spmd_ops.reduce_scatter, (Value("x", meta), "sum", 0, 1, ["y", "x"]), {}, (Value("y", meta),))
    found = launch_buffers(mesh, ((0, 0),), (StridedCall.of(call, [Strided.contiguous(meta)]),))
    assert [4] == [found.metas[number].numel for _, writes in found.packing for number in writes]


@pytest.mark.parametrize(("rank", "expected"), [(0, ([], [0], [4])), (1, ([], [4], []))])
def test_ranks_that_receive_nothing_in_a_permutation_make_zeros_when_it_ends(rank, expected):
    call = call_of(spmd_ops.permute, (4,), (4,), [-1, 0], [4])
    assert expected == numels(call, ranks=((rank,),))


@pytest.mark.parametrize("ranks", [2, 4])
def test_operands_are_held_until_their_call_returns(workers, ranks):
    workers.run(
        call_on_mesh, cases.operands_are_held_until_their_call_returns, {"data": ranks}, "distributed", ranks=ranks
    )


def test_the_fullest_rank_counts(workers):
    workers.run(call_on_mesh, cases.the_fullest_rank_counts, {"data": 2, "model": 2}, "distributed", ranks=4)
