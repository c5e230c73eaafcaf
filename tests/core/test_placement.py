import pytest
import torch

from spmd.core.placement import REDUCTIONS, Partial, Replicate, Shard, combine, neutral_element, supports_reduction
from spmd.errors import ShardingError

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.uint8, torch.bool)


def test_placements_are_values():
    assert {Shard(0), Shard(0), Shard(1), Replicate(), Replicate(), Partial(), Partial("sum"), Partial("max")} == {
        Shard(0),
        Shard(1),
        Replicate(),
        Partial("sum"),
        Partial("max"),
    }


@pytest.mark.parametrize("placement", [Shard(2), Shard(-1), Replicate(), Partial("min")])
def test_repr_evaluates_to_the_placement(placement):
    assert placement == eval(repr(placement))


def test_malformed_placements():
    with pytest.raises(ShardingError, match=r"must be one of sum, max, min \(got 'mean'\)"):
        Partial("mean")
    for dim in ("data", 1.0, True, None):
        with pytest.raises(ShardingError, match=r"Shard takes the number of a tensor dim .*write a spec: P\('data'\)"):
            Shard(dim)


@pytest.mark.parametrize(("op", "dtype"), [(o, d) for o in REDUCTIONS for d in DTYPES if supports_reduction(o, d)])
def test_the_neutral_element_changes_nothing(op, dtype):
    values = torch.tensor([1, 0, 1, 127]).to(dtype)
    neutral = torch.full_like(values, neutral_element(op, dtype))
    assert torch.equal(values, combine(op, values, neutral))
    assert torch.equal(values, combine(op, neutral, values))


def test_neutral_elements_hold_at_the_limits():
    infinite = torch.tensor([torch.inf, -torch.inf])
    for op in REDUCTIONS:
        neutral = torch.full_like(infinite, neutral_element(op, torch.float32))
        assert torch.equal(infinite, combine(op, infinite, neutral))


def test_combine():
    left, right = torch.tensor([1, -2]), torch.tensor([0, 5])
    assert [[1, 3], [1, 5], [0, -2]] == [combine(op, left, right).tolist() for op in REDUCTIONS]


def test_reductions_that_a_dtype_lacks():
    lacking = [(op, d) for op in REDUCTIONS for d in (*DTYPES, torch.complex64) if not supports_reduction(op, d)]
    assert [("sum", torch.bool), ("max", torch.complex64), ("min", torch.complex64)] == lacking
