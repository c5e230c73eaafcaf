"""Views of DTensors where torch's DTensor has tests: values, gradients, strides, and what needs no communication."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_peer_values import GRID, LINE, assert_same, check, randn

import spmd
from spmd import P

WIDE = spmd.make_mesh({"x": 3, "y": 2}, runtime="virtual")
SIX = spmd.make_mesh({"x": 6}, runtime="virtual")

VIEWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    **{
        f"atleast_{ndim}d of {list(shape)}": (getattr(torch, f"atleast_{ndim}d"), shape)
        for ndim, shapes in ((1, [(), (6,), (4, 6)]), (2, [(), (6,), (2, 3, 4)]), (3, [(), (6,), (4, 6), (2, 3, 4, 2)]))
        for shape in shapes
    },
    "broadcast_to, a dim more": (lambda x: torch.broadcast_to(x, (5, 4, 6)), (4, 6)),
    "broadcast_to, a dim of 1 more": (lambda x: torch.broadcast_to(x, (1, 4, 6)), (4, 6)),
    "broadcast_to, a dim of 1": (lambda x: torch.broadcast_to(x, (3, 4, 5, 6)), (4, 1, 6)),
    "broadcast_to, the same": (lambda x: torch.broadcast_to(x, (-1, 6)), (4, 6)),
    "expand": (lambda x: x.expand(3, 4, 5, -1, 2), (4, 1, 6, 1)),
    "flatten": (torch.flatten, (4, 6)),
    "flatten of one dim": (torch.flatten, (6,)),
    "flatten of a number": (torch.flatten, ()),
    "ravel": (torch.ravel, (4, 6)),
    "movedim": (lambda x: torch.movedim(x, 1, 2), (2, 4, 6, 3)),
    "movedim of two": (lambda x: torch.movedim(x, (1, 2), (-3, -2)), (4, 6, 3)),
    "movedim of all": (lambda x: torch.movedim(x, (0, 2, 1), (2, 1, 0)), (4, 6, 3)),
    "permute": (lambda x: torch.permute(x, (2, 0, 1)), (4, 6, 3)),
    "permute, from the end": (lambda x: torch.permute(x, (-1, -3, -2)), (4, 6, 3)),
    "transpose": (lambda x: torch.transpose(x, -1, 0), (4, 3, 2, 6)),
    "unsqueeze": (lambda x: torch.unsqueeze(x, 1), (4, 3, 6)),
    "squeeze": (torch.squeeze, (1, 4, 1, 6)),
    "repeat": (lambda x: x.repeat(1, 2, 1, 1, 2), (4, 6)),
    "tile": (lambda x: torch.tile(x, (1, 2, 1, 1, 2)), (4, 6)),
    "tile of the last dim": (lambda x: torch.tile(x, (1, 3)), (5, 4, 6)),
    "view_as_complex": (lambda x: torch.view_as_real(torch.view_as_complex(x)), (4, 3, 2)),
    "unflatten": (lambda x: x.unflatten(0, (4, 6)), (24, 3)),
    "unflatten to three": (lambda x: x.unflatten(0, (4, 2, 3)), (24, 3)),
}

SHAPES = [
    ((2, 3), (3, 2)),
    ((3, 4, 5), (12, 5)),
    ((2, 3, 4, 5, 7), (12, 70)),
    ((2, 3, 4, 5, 7), (3, 8, 7, 5)),
    ((3, 4, 8, 3), (12, 4, 2, 3)),
    ((3, 24), (1, 3, 2, 4, 1, 3, 1)),
    ((1, 1, 3, 2, 1, 1), (6, 1, 1, 1)),
    ((1, 1, 12, 1, 1, 1, 2, 5, 1), (3, 4, 1, 10)),
    ((2, 3, 4), (2, -1, 4)),
    ((1, 1, 12), (-1,)),
    ((1, 1, 6, 1, 4, 1), (-1,)),
    ((12, 7, 6), (6, 4, 7, 3)),
    ((6, 8), (-1,)),
    ((8, 6), (8, 2, -1)),
    ((4, 4), (-1, 8)),
    ((1, 2, 2, 2), (1, 2, 4)),
]


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    function, shape = VIEWS[name]
    check(function, randn(*shape))


@pytest.mark.parametrize(("shape", "other"), SHAPES, ids=repr)
def test_reshapes(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    check(lambda x: x.view(other), randn(*shape))


@pytest.mark.parametrize("length", [3, 4, 5])
def test_merged_and_split_dims_of_uneven_shards(length: int) -> None:
    value = torch.arange(6 * length * 3).view(6, length, 3)
    for spec in (P(None, "x"), P(None, ("y", "x")), P("x", "y"), P("y", None, "x")):
        x = spmd.distribute(value, spec, WIDE)
        merged = x.view(6 * length, 3)
        assert_same((merged, merged.view(6, length, 3)), (value.view(-1, 3), value))


@pytest.mark.parametrize("spec", [P(None, "x", "y"), P(None, None, "y"), P(None, ("x", "y"))], ids=repr)
@pytest.mark.parametrize("lengths", [(6, 3), (6, 4), (5, 4)], ids=repr)
def test_three_merged_dims_on_two_axes(lengths: tuple[int, int], spec: P) -> None:
    shape = (4, *lengths, 3)
    value = torch.arange(math.prod(shape)).view(shape)
    merged = spmd.distribute(value, spec, WIDE).view(-1, 3)
    assert_same((merged, merged.view(shape)), (value.view(-1, 3), value))


SILENT: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], P, P]] = {
    "transpose": (lambda x: x.transpose(0, 2), (4, 3, 6), P("x", None, "y"), P("y", None, "x")),
    "permute": (lambda x: x.permute(2, 0, 1), (4, 3, 6), P("x", None, "y"), P("y", "x")),
    "unsqueeze": (lambda x: x.unsqueeze(1), (4, 6), P("x", "y"), P("x", None, "y")),
    "expand": (lambda x: x.expand(3, 4, 6), (4, 6), P("x", "y"), P(None, "x", "y")),
    "merged dims": (lambda x: x.view(24, 3), (4, 6, 3), P("x", None, "y"), P("x", "y")),
    "merged dims, of uneven shards": (lambda x: x.view(5, 8), (5, 2, 2, 2), P("x"), P("x")),
    "a dim split": (lambda x: x.view(4, 3, 6), (12, 6), P("x", "y"), P("x", None, "y")),
    "other dims": (lambda x: x.view(5, 4, 2), (5, 2, 2, 2), P("x"), P("x")),
    "complex numbers": (torch.view_as_complex, (4, 3, 2), P("x"), P("x")),
    "a slice of the other dim": (lambda x: x[:, 2:], (12, 8), P("x"), P("x")),
    "a slice of rows": (lambda x: x[2:, :], (10, 12), P(None, "x"), P(None, "x")),
    "a slice of a replicated tensor": (lambda x: x[1:], (10,), P(), P()),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_sends_nothing(name: str) -> None:
    function, shape, spec, expected = SILENT[name]
    value = randn(*shape)
    with spmd.comms_of(error=True):
        result = function(spmd.distribute(value, spec, GRID))
    assert_same(result, function(value))
    assert expected == result.spec.pspec
    assert function(value).stride() == result.stride()


@pytest.mark.xfail(strict=True, raises=spmd.PlanError, reason="a shard of a dim of size 1 is moved to another dim")
@pytest.mark.parametrize("function", [lambda x: x.view(1, 2, 4), lambda x: x + 1], ids=["view", "add"])
def test_the_shard_of_a_single_row_stays(function: Callable[[Any], Any]) -> None:
    with spmd.comms_of(error=True):
        function(spmd.distribute(randn(1, 2, 2, 2), P("x"), GRID))


def test_merged_dims_may_move() -> None:
    """What torch's DTensor refuses, as its views never communicate."""
    for shape, spec, other in (((6, 12), P(None, "x"), (-1,)), ((8, 12), P("x"), (-1,)), ((4, 4), P("x"), (-1, 8))):
        value = randn(*shape)
        assert_same(spmd.distribute(value, spec, SIX).view(other), value.view(other))


def test_squeeze_in_place() -> None:
    held = [randn(1, 4) + rank for rank in range(6)]
    x = spmd.DTensor.from_local(held, WIDE, P(None, "y", partial={"x": "sum"}))
    value = x.full_tensor()
    assert torch.ops.aten.squeeze_.dim(x, 0) is x
    assert ((8,), (1,)) == (tuple(x.shape), x.stride())
    assert_same((x, x * 2), (value[0], value[0] * 2))


SLICES: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, 2:],
    "both": lambda x: x[2:, 1:].t(),
}


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=repr)
@pytest.mark.parametrize("name", SLICES)
def test_slices(name: str, spec: P) -> None:
    value = randn(12, 8)
    view, expected = SLICES[name](spmd.distribute(value, spec, LINE)), SLICES[name](value)
    assert_same(view, expected)
    assert expected.stride() == view.stride()
    view.mul_(2)
    assert_same(view, expected * 2)


@pytest.mark.parametrize("name", SLICES)
def test_offsets_of_slices(name: str) -> None:
    value = randn(12, 8)
    assert SLICES[name](value).storage_offset() == SLICES[name](spmd.distribute(value, P(), LINE)).storage_offset()


def test_as_strided_of_a_slice() -> None:
    value = randn(12, 8)
    x = spmd.distribute(value, P("x"), LINE)
    for offset in (None, 1):
        assert_same(x[2:].as_strided((3,), (1,), offset), value[2:].as_strided((3,), (1,), offset))


CALLS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "view of another size": (lambda x: x.view(5, -1), RuntimeError, "invalid for input of size 32"),
    "view of what is not contiguous": (lambda x: x.t().view(-1), (RuntimeError, ValueError), "(?i)view"),
    "broadcast_to another size": (lambda x: torch.broadcast_to(x, (1, 2, 4)), RuntimeError, "size"),
    "a dim that is not there": (lambda x: x.unsqueeze(5), IndexError, "Dimension out of range"),
    "a dim twice": (lambda x: x.permute(0, 0), RuntimeError, "(?i)permute|duplicate"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name: str) -> None:
    call, error, text = CALLS[name]
    with pytest.raises(error, match=text):
        call(spmd.distribute(randn(8, 4), P("x"), LINE))
