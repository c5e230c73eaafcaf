import itertools
import math

import pytest
import torch

from spmd.collectives.transport.transport_dtypes import moved, reduced
from spmd.core.placement import combine

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
CARRIED = [dtype for dtype in (*FLOATS, *INTEGERS, torch.bool) if dtype is not torch.int16]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3e38, -2.5]


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_wins_an_extremum(dtype, op):
    pairs = list(itertools.product(SPECIAL, repeat=2))
    left, right = (torch.tensor(side).to(dtype) for side in zip(*pairs, strict=True))
    wire = reduced(dtype, op)
    sent = [wire.encode(x) for x in (left, right)]
    assert not sent[0].is_floating_point()
    found = wire.decode(combine(op, *sent))
    assert dtype == found.dtype
    torch.testing.assert_close(combine(op, left, right), found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.complex64], ids=str)
def test_sums_are_torchs(dtype):
    left, right = (torch.tensor([3, 100, -7 if dtype.is_signed else 7]).to(dtype) * factor for factor in (1, 2))
    wire = reduced(dtype, "sum")
    sent = [wire.encode(x) for x in (left, right)]
    assert sent[0].dtype in CARRIED
    assert torch.equal(left + right, wire.decode(sent[0] + sent[1]))


def test_a_sum_wraps_around_as_torchs_does():
    x = torch.tensor([30000], dtype=torch.int16)
    wire = reduced(torch.int16, "sum")
    assert torch.equal(x + x, wire.decode(wire.encode(x) + wire.encode(x)))


@pytest.mark.parametrize("dtype", [*CARRIED, torch.int16, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("count", [0, 3])
def test_what_is_moved_comes_back(dtype, count):
    x = torch.tensor([0, 1, 2][:count]).to(dtype)
    wire = moved(dtype)
    sent = wire.encode(x)
    assert sent.dtype in CARRIED
    assert count * wire.factor == sent.numel()
    found = wire.decode(sent.clone())
    assert dtype == found.dtype
    assert x.tolist() == found.tolist()
