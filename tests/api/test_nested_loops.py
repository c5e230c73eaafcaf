"""Loops and branches three deep, under transforms, and bodies under autocast, beside one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop_cases import PLACES, TRANSFORMS, arguments
from torch import Tensor
from torch.utils._pytree import tree_leaves

import spmd

Function = Callable[[Tensor, Tensor, Tensor], Any]


def while_in_cond_in_scan(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    def halved(c: Tensor) -> Tensor:
        return spmd.while_loop(lambda d: d.square().sum() > 0.3, lambda d: 0.5 * torch.tanh(d @ w), c)

    def body(c: Tensor, x: Tensor) -> Any:
        c = spmd.cond(c.sum() > x.sum(), lambda: halved(c + x), lambda: torch.sin(c) + x)
        return c, c.mean()

    return spmd.scan(body, h, xs)


def cond_in_scan_in_scan(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    def inner(d: Tensor, row: Tensor) -> Any:
        d = spmd.cond((d.sum() > row.sum()), lambda: torch.sin(d @ w) + row, lambda: d * row)
        return d, d.sum()

    def body(c: Tensor, x: Tensor) -> Any:
        d, sums = spmd.scan(inner, c, x)
        return torch.tanh(d + c), sums * c.mean()

    return spmd.scan(body, h, xs)


def scan_in_cond_in_scan(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    def body(c: Tensor, x: Tensor) -> Any:
        many = lambda: spmd.fori_loop(0, 2, lambda i, d: torch.sin(d @ w) * (i + 1) + x, c)  # noqa: E731
        return spmd.cond(c.sum() > x.sum(), many, lambda: c * x), x.sum()

    return spmd.scan(body, h, xs, reverse=True)


def check(function: Function, transform: str, place: int, **close: float) -> None:
    axes, _, specs = PLACES[place]
    args, transformed = arguments(place), TRANSFORMS[transform](function)
    found = tree_leaves(spmd.jit(transformed, specs, mesh=spmd.make_mesh(axes, runtime="virtual"))(*args))
    for x, y in zip(found, tree_leaves(transformed(*args)), strict=True):
        torch.testing.assert_close(x.full_tensor(), y, **close)


FAST = (
    (while_in_cond_in_scan, "jvp", 1),
    (cond_in_scan_in_scan, "grad", 0),
    (cond_in_scan_in_scan, "vmap", 1),
    (scan_in_cond_in_scan, "vmap_of_grad", 1),
)
DEEP = [
    pytest.param(function, transform, place, marks=() if (function, transform, place) in FAST else pytest.mark.slow)
    for function, transforms in (
        (while_in_cond_in_scan, ("value", "jvp", "vmap")),
        (cond_in_scan_in_scan, TRANSFORMS),
        (scan_in_cond_in_scan, TRANSFORMS),
    )
    for transform in transforms
    for place in range(len(PLACES))
]


@pytest.mark.parametrize(("function", "transform", "place"), DEEP)
def test_three_deep(function: Function, transform: str, place: int) -> None:
    check(function, transform, place)


def cast_around(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return spmd.scan(lambda c, x: ((c.float() @ w.float()).double() + x, (x.float() @ w.float()).sum(0)), h, xs)


def cast_inside(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    def body(c: Tensor, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.nn.functional.linear(c.float(), w.float())
        more = spmd.cond(x.sum() > 0, lambda: y.float(), lambda: torch.tanh(y).float())
        return torch.tanh(more.double() + x), y

    return spmd.scan(body, h, xs)


def cast_in_part(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):

        def body(c: Tensor, x: Tensor) -> Any:
            with torch.autocast("cpu", enabled=False):
                y = c.float() @ w.float()
            return ((y @ w.float()).double() + x, y)

        return spmd.scan(body, h, xs)


FAST_CASTS = ((cast_around, "grad", 1), (cast_inside, "grad", 0), (cast_in_part, "jvp", 0))


@pytest.mark.parametrize(
    ("function", "transform", "place"),
    [
        pytest.param(f, t, place, marks=() if (f, t, place) in FAST_CASTS else pytest.mark.slow)
        for f in (cast_around, cast_inside, cast_in_part)
        for t in ("value", "grad", "jvp", "vmap", "vmap_of_grad")
        for place in (0, 1)
    ],
)
def test_autocast(function: Function, transform: str, place: int) -> None:
    check(function, transform, place, rtol=2**-6, atol=2**-6)  # the accuracy of bfloat16
