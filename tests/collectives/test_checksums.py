"""Checksums of tensors, by address and by operators, as on a device."""

import pytest
import torch

from spmd.collectives.distributed import checksums
from spmd.collectives.distributed.checksums import as_bytes, of_words

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.bool]


def on_host(value):
    return checksums.checksums([value])[0]


def by_operators(value):
    return of_words(as_bytes(value)).item()


WAYS = pytest.mark.parametrize("checksum", [on_host, by_operators])


def made(dtype, size=1000):
    return torch.arange(size).remainder(2).to(dtype) if dtype is torch.bool else (torch.randn(size) * 50).to(dtype)


@WAYS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_elements_have_one_checksum_whatever_their_strides(checksum, dtype):
    value = made(dtype).view(10, 100)
    assert checksum(value) == checksum(value.t().contiguous().t()) == checksum(value.clone())
    memory = torch.cat([value.flatten()[:1], value.flatten()])
    assert checksum(value[1:]) == checksum(memory[101:])  # at an address between words
    assert checksum(value.flatten()[:0]) == checksum(memory[:0])


@WAYS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", ["one", "all negated", "swapped", "zeros"])
def test_other_elements_have_other_checksums(checksum, dtype, change):
    value = made(dtype)
    other = value.clone()
    if change == "one":
        other[7] = ~other[7] if dtype is torch.bool else other[7] + 1
    elif change == "all negated":
        other = ~other if dtype is torch.bool else -other  # their top bits only, in floating point
    elif change == "swapped":
        other[[3, 4]] = other[[4, 3]]
    else:
        value, other = torch.zeros_like(value), torch.ones_like(value)
    assert checksum(value) != checksum(other)


def test_blocks_are_told_apart(monkeypatch):
    value = made(torch.float32)
    monkeypatch.setattr(checksums, "BLOCK", 64)
    assert by_operators(value) != by_operators(value.view(-1, 500).flip(0))


def test_several_are_computed_at_once():
    values = [made(dtype) for dtype in DTYPES]
    assert [on_host(value) for value in values] == checksums.checksums(values)
