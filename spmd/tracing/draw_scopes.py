"""The keys by which a program draws with `rng="counter"`: of a seed, of the place of a call, and of the trip of loops.

A scope has a key, and numbers the draws in it in program order; each trip of a loop, and each side of a branch, is a
scope of its own. So a function that is traced again, for a derivative, draws the same numbers again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import attrs
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from spmd.core.mesh import default_mesh
from spmd.ir.graph import Graph
from spmd.ir.simplify import eliminate_dead
from spmd.random.generators.draw import DERIVE_KEY
from spmd.random.generators.implementations import GENERATORS
from spmd.tracing.active_transforms import unwrapped
from spmd.tracing.running import is_tracing, running_trace

Rng = Literal["torch", "counter"]
"""What torch's random operators draw by: its default generator, or the keys of a seed."""

IMPL = "philox4x32"
"""The generator of `rng="counter"`."""

_Trip = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]


@attrs.define(eq=False)
class DrawScope:
    """A part of a program with a key of its own.

    Args:
        key: the key, i64[2].
        count: how many keys have been made of it.
    """

    key: Tensor
    count: int = 0

    def next_key(self) -> Tensor:
        """One more key, i64[2]: that of the next draw, loop or branch."""
        self.count += 1
        return _folded(self.key, self.count - 1)

    @property
    def position(self) -> tuple[Tensor, int]:
        """What the next keys depend on."""
        return self.key, self.count

    def restore(self, position: tuple[Tensor, int]) -> None:
        """Go on from a position that the scope has had."""
        self.key, self.count = position

    def reseed(self, seed: int) -> None:
        """Go on with the keys of a number, which are the same in each call."""
        with temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunction():
            number = (seed + 2**63) % 2**64 - 2**63
            self.restore((GENERATORS[IMPL].seeded(torch.full_like(self.key[0], number)), 0))


_scope: ContextVar[DrawScope | None] = ContextVar("spmd_draw_scope", default=None)


def draw_scope() -> DrawScope | None:
    """The scope in which a call draws; None where torch's generator draws."""
    return _scope.get()


@contextlib.contextmanager
def drawing_by(key: Tensor, count: int = 0) -> Iterator[DrawScope]:
    """A context in which torch's random operators draw by a key, of which a count of keys has been made."""
    scope = DrawScope(key, count)
    token = _scope.set(scope)
    try:
        yield scope
    finally:
        _scope.reset(token)


def seed_key() -> Tensor:
    """The key of a seed of 64 bits, which torch's default generator draws: each call of a program has another one."""
    mesh = default_mesh()
    with temporarily_clear_interpreter_stack():
        seed = torch.empty((), dtype=torch.int64, device="cpu" if mesh is None else mesh.device)
        return GENERATORS[IMPL].seeded(seed.random_(-(2**63), None))


def without_unused_seed(graph: Graph) -> Graph:
    """The program that began with `seed_key`, without drawing a seed if nothing depends on it."""
    seed = next(operation.tensors[0] for operation in graph.operations if operation.is_random)
    live = eliminate_dead(graph)
    if any(seed in operation.operands for operation in live.operations):
        return graph
    rest = tuple(operation for operation in live.operations if seed not in operation.results)
    return eliminate_dead(attrs.evolve(live, operations=rest))


def in_trips(xs: Sequence[Tensor], length: int) -> tuple[Callable[[_Trip], _Trip], Sequence[Tensor]]:
    """What gives each trip of a loop of known length a scope, and the rows that the loop takes for it.

    Args:
        xs: the rows.
        length: how many trips there are.

    Returns:
        From a trip to a trip that takes the rows, and the rows.
    """
    scope = draw_scope()
    if scope is None:
        return lambda trip: trip, xs
    keys = _folded(scope.next_key(), range(length))

    def scoped(trip: _Trip) -> _Trip:
        def by_key(carry: list[Tensor], x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            with drawing_by(x[-1]):
                return trip(carry, x[:-1])

        return by_key

    return scoped, [*xs, keys]


def in_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that has a scope of its own, of this place in the program."""
    scope = draw_scope()
    if scope is None:
        return function
    key = scope.next_key()

    def scoped(*args: Any) -> Any:
        with drawing_by(key):
            return function(*args)

    return scoped


class TripCounter:
    """Counts the trips of a loop whose length is data, as one more carry, where they draw by keys."""

    def __init__(self) -> None:
        scope = draw_scope()
        self._key = None if scope is None else scope.next_key()

    @property
    def start(self) -> list[Tensor]:
        """The carries that it adds: none where no key is drawn by."""
        return [] if self._key is None else [torch.zeros((), dtype=torch.int64, device=self._key.device)]

    def scope(self, count: Sequence[Tensor], part: int) -> contextlib.AbstractContextManager[DrawScope | None]:
        """A context for a part of a trip: 0 for the condition, 1 for the body."""
        if self._key is None:
            return contextlib.nullcontext()
        return drawing_by(_folded(self._key, count[0] * 2 + part))


def _folded(key: Tensor, data: int | range | Tensor) -> Tensor:
    """The keys that numbers make of a key, on which no transform acts."""
    with temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunction():
        key = _in_trace(key) if is_tracing() else unwrapped(key)
        if isinstance(data, range):
            return DERIVE_KEY(key.unsqueeze(0), torch.arange(len(data), device=key.device), IMPL)  # type: ignore[no-any-return]
        number = data if isinstance(data, Tensor) else torch.full((), data, dtype=torch.int64, device=key.device)
        return DERIVE_KEY(key, number, IMPL)  # type: ignore[no-any-return]


def _in_trace(key: Tensor) -> Tensor:
    """The key in the trace that is running, which may be that of a body of a loop."""
    trace = running_trace()
    key = unwrapped(trace.take(key))
    if trace.recorder.observer is not None:
        trace.recorder.observer.declare_constant(trace.value(key))
    return key
