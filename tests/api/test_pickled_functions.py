"""Jitted functions that are pickled and copied: by reference, as functions are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import spmd
from spmd import P

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")


@spmd.jit(P("data"), mesh=MESH)
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by
        self.held = spmd.jit(self.scale, P("data"), mesh=MESH)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.by * x


def test_a_function_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(double)) is double
    assert pickle.loads(pickle.dumps({"step": double}))["step"] is double
    assert copy.copy(double) is copy.deepcopy(double) is double
    double(torch.ones(4))
    assert len(pickle.dumps(double)) < 200


def test_a_function_without_a_name_is_not_pickled() -> None:
    made = spmd.jit(lambda x: 2 * x, P("data"), mesh=MESH)
    assert copy.deepcopy(made) is made
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(made)


def test_a_method_is_copied_with_its_object() -> None:
    one = Scale(3.0)
    one.held(torch.ones(4))
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        other.by = 5.0
        assert other.held(torch.ones(4)).tolist() == [5.0] * 4
    assert one.held(torch.ones(4)).tolist() == [3.0] * 4


def test_a_module_is_copied() -> None:
    model = spmd.jit(torch.nn.Linear(3, 2), mesh=MESH)
    x = torch.ones(2, 3)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other is not model and torch.equal(other(x), expected)
