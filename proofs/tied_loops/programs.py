"""Random small programs with loops, to be planned."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

import spmd
from spmd import Machine, P
from spmd.inspect import Plan

ROWS, WIDTH = 16, 8
"""The sizes of what is carried; no two dims of a tensor are equal, so that no atoms are those of other dims."""

STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "product": lambda x, w, v: x @ w,
    "with both": lambda x, w, v: torch.tanh(x @ w) @ v,
    "transposed": lambda x, w, v: x @ v.T,
    "tanh": lambda x, w, v: torch.tanh(x),
    "add": lambda x, w, v: x + w[0],
    "norm": lambda x, w, v: x / (1 + x.square().sum(1, keepdim=True)),
    "center": lambda x, w, v: x - x.mean(0),
    "weights alone": lambda x, w, v: x * (w * v).sum(),
    "rows alone": lambda x, w, v: x + (x.T @ x).sum(0),
}
"""What a trip may do to what is carried, with a row of what is scanned and with what is closed over."""

MACHINES = (
    Machine(flops=1e9, memory_bandwidth=1e8, link_bandwidth=1e9, latency=0.0, fuses=False),
    Machine(flops=1e10, memory_bandwidth=1e10, link_bandwidth=1e8, latency=0.0, fuses=False),
)
"""Launches take no time, as loops have fewer of them; nothing is fused, as unrolled programs would fuse trips."""

SPECS = (P(), P("x"), P(None, "x"))


def body(draw: random.Random) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What one trip computes: the next carry, and what it leaves."""
    names = [draw.choice(list(STEPS)) for _ in range(draw.randint(1, 4))]
    leaves = draw.choice(["square", "sum"])

    def trip(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        for name in names:
            y = STEPS[name](y, w, v)
        return y, (x.square() if leaves == "square" else x.sum(0))

    return trip


def program(draw: random.Random) -> Callable[..., Any]:
    """A function of the arguments of `Drawn.function`."""
    first, second = body(draw), body(draw)
    kind, reverse = draw.choice(["one", "two", "nested"]), draw.random() < 0.5

    def values(x: Tensor, ws: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        def outer(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            x, y = spmd.scan(lambda x, w: first(x, w, v), x, ws[:2])
            return second(x, w, v)[0], y

        if kind == "nested":
            return spmd.scan(outer, x, ws, reverse=reverse)
        x, ys = spmd.scan(lambda x, w: first(x, w, v), x, ws, reverse=reverse)
        return (x, ys) if kind == "one" else spmd.scan(lambda x, w: second(x, w, v), x, ws * ys.mean())

    if draw.random() < 0.4:
        return values
    return torch.func.grad_and_value(lambda *args: sum(each.square().sum() for each in values(*args)), (0, 1, 2))


@attrs.frozen(eq=False)
class Drawn:
    """A program on a mesh of one axis.

    Args:
        function: of what is carried first, of stacked weights, and of a weight.
        shapes: those of its arguments.
        jitted: the function with specs, on the mesh.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    jitted: Any

    def plan(self) -> Plan:
        """Its plan."""
        plan: Plan = self.jitted.plan(*(torch.empty(shape, device="meta") for shape in self.shapes))
        return plan


def drawn(seed: int) -> Drawn:
    """The program of a seed."""
    draw = random.Random(seed)
    function = program(draw)
    mesh = spmd.make_mesh({"x": draw.choice([2, 3, 4])}, runtime="abstract")
    shapes = (ROWS, WIDTH), (draw.randint(1, 4), WIDTH, WIDTH), (WIDTH, WIDTH)
    specs = draw.choice(SPECS), draw.choice((P(), P(None, "x"), P(None, None, "x"))), draw.choice(SPECS)
    return Drawn(function, shapes, spmd.jit(function, specs, P(), mesh=mesh, machine=draw.choice(MACHINES)))
