"""Functions with loops and branches, the transforms that act on them, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import spmd
from spmd import P
from spmd.core.mesh import Mesh, Runtime
from spmd.testing.executed import Executed, ExecutedCollectives

Function = Callable[..., Any]

PLACES: tuple[tuple[dict[str, int], tuple[int, int], tuple[P, P, P]], ...] = (
    ({"data": 2, "model": 2}, (6, 4), (P("data"), P(None, "data"), P("model"))),
    ({"data": 3}, (5, 3), (P(None, "data"), P(None, None, "data"), P("data"))),
    ({"data": 8}, (1, 2), (P(), P("data"), P(None, "data"))),
)
"""Meshes with the shape of a carry and the specs of carry, rows and weight: even, uneven and empty shards."""

TRIPS = 5


def rnn(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.scan(lambda c, x: (torch.tanh(c @ w + x), c.sum()), h, xs)


def reverse(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    def body(carry: Any, x: Tensor) -> Any:
        a, b = carry
        return (torch.tanh(a @ w + x), a * b), (a.sum(0), x.sin())

    return spmd.scan(body, (h, h * 2), xs, reverse=True)


def exchange(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.scan(lambda carry, x: ((carry[1], carry[0] + x), None), (h, h.cos()), xs)[0]


def nested(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    def body(c: Tensor, x: Tensor) -> Any:
        inner = spmd.fori_loop(0, 3, lambda i, d: torch.sin(d @ w) + x * i, c)
        return inner, inner.mean()

    return spmd.scan(body, h, xs)


def branch(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.cond(h.sum() > xs.sum(), lambda: (torch.sin(h @ w), xs.sum(0)), lambda: (h * 2, xs[0]))


def branch_in_loop(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    def body(c: Tensor, x: Tensor) -> Any:
        c = spmd.cond(c.sum() > x.sum(), lambda: torch.sin(c @ w), lambda: c * x)
        return c, c.sum()

    return spmd.scan(body, h, xs)


def switches(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    index = (xs.sum() > 0).long() + (h.sum() > 0).long()
    return spmd.switch(index, [lambda x: x @ w, torch.sin, lambda x: x * xs.sum(0)], h)


def constants(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.scan(lambda c, x: (c + x.sum(), torch.arange(3) * c), torch.zeros((), dtype=xs.dtype), xs)


def dead(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.scan(lambda carry, x: ((carry[0] @ w, carry[1] + x), carry[0].sum()), (h, h), xs)[0][1]


def invariant(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.scan(lambda c, x: (torch.tanh(c @ (w @ w.T)), w.sum() * x.mean()), h, xs), w @ w.T


def mapped(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.map(lambda x: torch.tanh(x @ w) + h, xs)


def associative(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.associative_scan(lambda a, b: a * b + b, xs)


def newton(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    x = xs.square().sum() + 1
    return spmd.while_loop(lambda r: (r * r - x).abs() > 1e-9, lambda r: r - (r * r - x) / (2 * r), x)


def until_small(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.while_loop(
        lambda carry: carry[0].square().sum() > 0.5,
        lambda carry: (torch.tanh(carry[0] @ w) * 0.7, carry[1] + 1),
        (h, torch.tensor(0)),
    )


def statistics(h: Tensor, xs: Tensor, w: Tensor, spread: Function = lambda y: y) -> Any:
    """Sums over the rows of each trip, of which two are there at once, and products that do not need them."""

    def body(carry: Any, x: Tensor) -> Any:
        y = spread(torch.tanh(x @ w + carry[0]))
        first, second = y.sum(0), y.square().sum(0)
        z = torch.tanh(torch.tanh(y @ w) @ w)
        return (torch.sin(first) + carry[1], torch.cos(first * second)), z.mean()

    return spmd.scan(body, (h[0], h[0]), xs)


def sums_of_shards(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return statistics(h, xs, w, lambda y: spmd.constrain(y, P("data")))


def _leaves(results: Any) -> list[Tensor]:
    return [x for x in tree_leaves(results) if isinstance(x, Tensor)]


def _loss(f: Function) -> Function:
    return lambda *args: sum((x * x).sin().sum() for x in _leaves(f(*args)) if x.is_floating_point())


def _by_autograd(f: Function) -> Function:
    def twice(*args: Tensor) -> Any:
        inputs = [x.clone().requires_grad_() for x in args]
        options: Any = {"allow_unused": True, "materialize_grads": True}
        first = torch.autograd.grad(_loss(f)(*inputs), inputs, create_graph=True, **options)
        return *first, *torch.autograd.grad(sum(x.square().sum() for x in first), inputs, **options)

    return twice


def _gradient(f: Function) -> Function:
    return torch.func.grad(_loss(f), (0, 1, 2))


TRANSFORMS: dict[str, Function] = {
    "value": lambda f: f,
    "grad": _gradient,
    "grad_of_grad": lambda f: _gradient(_gradient(f)),
    "jvp": lambda f: lambda *args: torch.func.jvp(f, args, args),
    "jvp_of_grad": lambda f: lambda *args: torch.func.jvp(_gradient(f), args, args),
    "autograd_twice": _by_autograd,
    "vmap": lambda f: lambda h, xs, w: torch.vmap(f, (None, 0, None))(h, torch.stack([xs, xs * 0.3]), w),
    "vmap_of_grad": lambda f: lambda h, xs, w: torch.vmap(_gradient(f), (0, None, None))(torch.stack([h, -h]), xs, w),
    "grad_of_vmap": lambda f: _gradient(
        lambda h, xs, w: torch.vmap(f, (0, 0, None))(torch.stack([h, -h]), torch.stack([xs, xs * 0.3]), w)
    ),
}
FUNCTIONS = (
    rnn, reverse, exchange, nested, branch, branch_in_loop, switches, constants, dead, invariant, mapped, associative,
)  # fmt: skip
LOOPS_OF_UNKNOWN_LENGTH = newton, until_small
OF_KNOWN_TRIPS = rnn, reverse, exchange, nested, constants, dead, invariant, mapped, associative, sums_of_shards
"""Those without branches, of which one side runs."""
FORWARD = "value", "jvp", "vmap"


def arguments(place: int) -> list[Tensor]:
    """A carry, the rows of a loop and a weight."""
    shape = PLACES[place][1]
    generator = torch.Generator().manual_seed(place)
    shapes = shape, (TRIPS, *shape), (shape[1], shape[1])
    return [0.5 * torch.randn(one, generator=generator, dtype=torch.float64) for one in shapes]


def check(mesh: Mesh, function: Function, transform: str, place: int, truth: Function | None = None) -> None:
    """Compare a function under a transform, inside of jit, with itself or another one on one device."""
    transformed, args = TRANSFORMS[transform](function), arguments(place)
    jitted = spmd.jit(transformed, PLACES[place][2], mesh=mesh)
    with ExecutedCollectives() as executed:
        found = _leaves(jitted(*args))
    wanted = _leaves(TRANSFORMS[transform](truth or function)(*args))
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.full_tensor(), y, rtol=1e-8, atol=1e-10)  # type: ignore[attr-defined]
    if mesh.runtime is Runtime.DISTRIBUTED and function in OF_KNOWN_TRIPS and not place:  # others pad uneven shards
        planned = Executed.of_plan(jitted.plan(*args).comms, mesh)
        for one, other in zip(sorted(planned), sorted(executed.found), strict=True):
            assert (one.kind, one.ranks) == (other.kind, other.ranks)
            assert abs(one.bytes - other.bytes) <= 8 * mesh.size  # a bucket is divided as a whole


def check_all(mesh: Mesh) -> None:
    """Compare values of all functions, and gradients, with one device, with a process for each rank."""
    place = [axes for axes, *_ in PLACES].index(dict(mesh.axes))
    for function in (*FUNCTIONS, *LOOPS_OF_UNKNOWN_LENGTH):
        check(mesh, function, "value", place)
    check(mesh, branch_in_loop, "grad", place)
    check(mesh, sums_of_shards, "grad", place, statistics)
