"""Memory of the buffers of collectives under way."""

import math

import memory_cases as cases
import pytest
import torch
from workers import call_on_mesh

from spmd.core.spec import TensorMeta
from spmd.ir.comm import StepKind
from spmd.plan.memory.in_flight import Sizes, sizes
from spmd.plan.memory.liveness import Collective

F32 = torch.float32


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_limit_makes_plans_synchronous(workers, ranks):
    workers.run(call_on_mesh, cases.a_limit_makes_plans_synchronous, {"data": ranks}, "distributed", ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_buffers_count(workers, ranks):
    workers.run(call_on_mesh, cases.buffers_count, {"data": ranks}, "distributed", ranks=ranks)


def collective(kind, operand, result, *arguments, contiguous=True):
    return Collective(kind, ("x",), arguments, TensorMeta(operand, F32), TensorMeta(result, F32), contiguous)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (collective(StepKind.ALL_REDUCE, (6, 2), (6, 2), "sum"), Sizes(0, 12, 0, 12, 0)),
        (collective(StepKind.ALL_REDUCE, (6, 2), (6, 2), "sum", contiguous=False), Sizes(12, 12, 0, 12, 0)),
        (collective(StepKind.ALL_GATHER, (2, 3), (4, 3), 0, 4), Sizes(0, 12, 0, 6, 12)),
        (collective(StepKind.ALL_GATHER, (3, 2), (3, 4), 1, 4), Sizes(0, 12, 12, 6, 12)),
        (collective(StepKind.ALL_GATHER, (3, 3), (5, 3), 0, 5), Sizes(0, 18, 15, 9, 15)),
        (collective(StepKind.REDUCE_SCATTER, (4, 3), (2, 3), "sum", 0, 2), Sizes(0, 6, 0, 12, 0)),
        (collective(StepKind.REDUCE_SCATTER, (3, 4), (3, 2), "sum", 1, 2), Sizes(12, 6, 0, 12, 0)),
        (collective(StepKind.REDUCE_SCATTER, (5, 3), (3, 3), "sum", 0, 3), Sizes(18, 9, 0, 18, 0)),
        (collective(StepKind.ALL_TO_ALL, (4, 3), (2, 6), 0, 1, 4, 6), Sizes(0, 12, 12, 0, 12)),
        (collective(StepKind.ALL_TO_ALL, (3, 4), (6, 2), 1, 0, 4, 6), Sizes(12, 12, 0, 12, 0)),
        (collective(StepKind.PERMUTE, (4,), (4,), [0, 1], [4]), Sizes(0, 4, 0, 0, 0)),
    ],
    ids=str,
)
def test_the_sizes_of_buffers_among_two_ranks(one, expected):
    assert expected == sizes(one, 2)
    assert math.prod(one.result.shape) in (expected.unpacked, expected.pending) or expected.unpacked == 15
