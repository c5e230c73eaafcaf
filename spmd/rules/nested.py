"""Local implementations along one sharded dim, which combine where several dims are sharded over several mesh axes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import attrs

from spmd.collectives.blocks import sharded_in_blocks
from spmd.ir.call import Call
from spmd.rules.rule import Axes, Body

Inner: TypeAlias = Callable[..., Any]
"""The operator, or its local implementation along another dim."""


@attrs.frozen
class Along:
    """A local implementation (`Body`) along one dim, around the operator or around the one along another dim.

    `run(axes, call, inner, dim, *args, **kwargs)` makes the windows of the operands in `dim` by exchanges over `axes`,
    calls `inner` with them and with arguments that are changed in `dim` only, and finishes in `dim`, as by the
    transpose of an exchange. It reads only `dim` of the shapes in `call`, and later dims: `inner` may be the one along
    a later dim, so that along earlier dims tensors may be windows.

    Args:
        dim: the dim of operands and results that is sharded.
        run: the implementation.
        block: the size of the blocks in which the dim is sharded, for an implementation that knows the dim by
            `shard_offset` only; None for one that needs it sharded between any elements where results are.
    """

    dim: int
    run: Callable[..., Any]
    block: int | None = None

    def __call__(self, axes: Axes, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Run around the operator."""
        return self.around(call.op, axes, call, *args, **kwargs)

    def around(self, inner: Inner, axes: Axes, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Run around the operator, or around the implementation along a later dim."""
        with contextlib.nullcontext() if self.block is None else sharded_in_blocks(self.block):
            return self.run(axes, call, inner, self.dim, *args, **kwargs)


@attrs.frozen
class Nested:
    """The local implementation of an operator that is sharded along several dims, each over mesh axes of its own.

    Args:
        levels: the implementation along each dim and its mesh axes, outermost first: in the order of the dims.
    """

    levels: tuple[tuple[Along, Axes], ...]

    def __call__(self, axes: Axes, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Run all levels around the operator."""
        run: Inner = call.op
        for body, spanned in reversed(self.levels):
            run = partial(body.around, run, spanned, call)
        return run(*args, **kwargs)


def combined(bodies: Mapping[str, Body]) -> Body:
    """One local implementation for an operator whose strategies have some on several mesh axes, major first."""
    spans: dict[Body, list[str]] = {}
    for axis, body in bodies.items():
        spans.setdefault(body, []).append(axis)
    if len(spans) == 1:
        return next(iter(spans))
    ordered = sorted(spans.items(), key=lambda level: level[0].dim)  # type: ignore[attr-defined]
    return Nested(tuple((body, tuple(axes)) for body, axes in ordered))  # type: ignore[misc]


def combine(body: Body, other: Body) -> bool:
    """Test two local implementations for sharding different dims, so that one can run around the other."""
    return isinstance(body, Along) and isinstance(other, Along) and body.dim != other.dim
