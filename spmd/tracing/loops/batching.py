"""Loops, branches and layers under vmap: a construct whose body is batched.

As in JAX, a predicate that differs between items makes a branch compute both sides and select, and a loop run until it
is done for all items; an item that is done keeps its carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.ir.effects import Effect
from spmd.ir.graph import Graph
from spmd.ir.regions import NEXT
from spmd.tracing.loops.closed import Closed
from spmd.tracing.loops.constructs import Body, Branch, Construct, Loop, Subprogram, While, with_equal_inputs
from spmd.tracing.loops.per_rank import again
from spmd.tracing.loops.replay import Apply, body_of, run
from spmd.tracing.source import where

Dims = Sequence[int | None]


def batched(
    construct: Construct, info: Any, in_dims: Dims, operands: Sequence[torch.Tensor], apply: Apply
) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
    """The results of a construct for a batch of operands, and the dim of the batch in each.

    Args:
        construct: the construct.
        info: as torch gives it to rules of vmap: the size of the batch, and how random numbers are drawn.
        in_dims: the dim of the batch in each operand; None of one that is the same for all items.
        operands: the operands.
        apply: calls a construct with its operands.
    """
    batch = _Batch(info.batch_size, info.randomness, apply)
    if isinstance(construct, Loop):
        return batch.loop(construct, in_dims, operands)
    if isinstance(construct, While):
        return batch.while_(construct, in_dims, operands)
    if isinstance(construct, Subprogram):
        return batch.subprogram(construct, in_dims, operands)
    return batch.branch(construct, in_dims, operands)


@attrs.frozen
class _Batch:
    size: int
    randomness: str
    apply: Apply

    def moved(self, x: torch.Tensor, dim: int | None, to: int | None) -> torch.Tensor:
        """A tensor whose batch is another dim; expanded if it has none."""
        if to is None:
            return x
        return (
            x.movedim(dim, to) if dim is not None else x.unsqueeze(to).expand(*x.shape[:to], self.size, *x.shape[to:])
        )

    def program(self, body: Body, inputs: Sequence[bool], outputs: Sequence[bool]) -> Closed:
        """A program over batches, in the first dim of the inputs and outputs that have one."""

        def mapped(*tensors: torch.Tensor) -> list[torch.Tensor]:
            function = lambda *each: tuple(run(body, each, self.apply))  # noqa: E731
            if not any(inputs):
                found = list(function(*tensors))
                return [self.moved(x, None, 0 if has else None) for x, has in zip(found, outputs, strict=True)]
            in_dims, out_dims = (tuple(0 if has else None for has in which) for which in (inputs, outputs))
            vmap: Any = torch.vmap
            return list(vmap(function, in_dims, out_dims, randomness=self.randomness)(*tensors))

        like = [again(value, self.meta(value.meta, has)) for value, has in zip(body.inputs, inputs, strict=True)]
        return body_of(mapped, like, body.outputs, body.functions)

    def meta(self, meta: TensorMeta, has: bool) -> TensorMeta:
        """The meta of a batch."""
        return TensorMeta((self.size, *meta.shape), meta.dtype) if has else meta

    def carried(self, body: Body, carries: int, given: list[bool], more: bool = False) -> list[bool]:
        """Which inputs of a body have a batch, if its outputs are its first inputs in the next trip.

        With `more`, also all those that it does not return as they are.
        """
        while True:
            left = _depending(body.graph, given)
            changed = [more and new is not old for new, old in zip(body.outputs, body.inputs, strict=False)]
            found = [has or changed[n] or left[n] for n, has in enumerate(given[:carries])] + given[carries:]
            if found == given:
                return found
            given = found

    def loop(self, loop: Loop, in_dims: Dims, operands: Sequence[torch.Tensor]) -> Any:
        sliced = loop.carries + loop.items
        has = self.carried(loop.body, loop.carries, [dim is not None for dim in in_dims])
        left = [*has[: loop.carries], *_depending(loop.body.graph, has)[loop.carries :]]
        body = self.program(loop.body, has, left)
        to = [(1 if loop.carries <= n < sliced else 0) if each else None for n, each in enumerate(has)]
        given = [self.moved(x, dim, place) for x, dim, place in zip(operands, in_dims, to, strict=True)]
        results = self.apply(attrs.evolve(loop, body=body.body), *given, *body.closed_over)
        dims = [(0 if n < loop.carries else 1) if each else None for n, each in enumerate(left)]
        return tuple(results), tuple(dims)

    def while_(self, loop: While, in_dims: Dims, operands: Sequence[torch.Tensor]) -> Any:
        has = self.carried(loop.body, loop.carries, [dim is not None for dim in in_dims])
        (differs,) = _depending(loop.condition.graph, has)
        if differs:
            _refuse_effects(loop.condition, loop.body)
            has = self.carried(loop.body, loop.carries, has, more=True)
        left = has[: loop.carries]
        tested, body = self.program(loop.condition, has, [differs]), self.program(loop.body, has, left)
        programs = with_equal_inputs(len(has), tested.body, body.body)
        constants = (*tested.closed_over, *body.closed_over)
        if differs:
            programs, more = self._until_all_are_done(programs, left)
            constants = (*constants, *more)
        given = [self.moved(x, dim, 0 if each else None) for x, dim, each in zip(operands, in_dims, has, strict=True)]
        results = self.apply(While(*programs, loop.carries), *given, *constants)
        return tuple(results), tuple(0 if each else None for each in left)

    def _until_all_are_done(
        self, programs: tuple[Body, Body], has: Sequence[bool]
    ) -> tuple[tuple[Body, Body], tuple[torch.Tensor, ...]]:
        """The programs of a loop that ends when its condition is false for all items, and what they close over."""
        condition, body = programs
        like = condition.inputs

        def some(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return [run(condition, tensors, self.apply)[0].any()]

        def masked(*tensors: torch.Tensor) -> list[torch.Tensor]:
            (goes_on,) = run(condition, tensors, self.apply)
            new = run(body, tensors, self.apply)
            return [_select(goes_on, x, old) if each else old for x, old, each in zip(new, tensors, has, strict=False)]

        tested = body_of(some, like, condition.outputs, condition.functions)
        closed = body_of(masked, like, body.outputs, body.functions)
        return with_equal_inputs(len(like), tested.body, closed.body), (*tested.closed_over, *closed.closed_over)

    def subprogram(self, called: Subprogram, in_dims: Dims, operands: Sequence[torch.Tensor]) -> Any:
        has = tuple(dim is not None for dim in in_dims)
        left = _depending(called.body.graph, has)

        def make() -> tuple[Subprogram, tuple[torch.Tensor, ...]]:
            closed = self.program(called.body, has, left)
            return Subprogram(closed.body), closed.closed_over

        of_batches, constants = called.once((self.size, self.randomness, has), make)
        given = [self.moved(x, dim, 0 if dim is not None else None) for x, dim in zip(operands, in_dims, strict=True)]
        results = self.apply(of_batches, *given, *constants)
        return tuple(results), tuple(0 if each else None for each in left)

    def branch(self, branch: Branch, in_dims: Dims, operands: Sequence[torch.Tensor]) -> Any:
        has = [dim is not None for dim in in_dims]
        given = [self.moved(x, dim, 0 if dim is not None else None) for x, dim in zip(operands, in_dims, strict=True)]
        if has[0]:
            _refuse_effects(*branch.sides)
            every = [True] * len(branch.results)
            sides = [self.program(side, has[1:], every) for side in branch.sides]
            found = []
            for side, which in zip(sides, (given[0], ~given[0]), strict=True):
                read = [selected(which, x) if each else x for x, each in zip(given[1:], has[1:], strict=True)]
                found.append(run(side.body, [*read, *side.closed_over], self.apply))
            return tuple(_select(given[0], x, y) for x, y in zip(*found, strict=True)), (0,) * len(every)
        left = [a or b for a, b in zip(*(_depending(side.graph, has[1:]) for side in branch.sides), strict=True)]
        sides = [self.program(side, has[1:], left) for side in branch.sides]
        programs = with_equal_inputs(len(has) - 1, sides[0].body, sides[1].body)
        constants = (*sides[0].closed_over, *sides[1].closed_over)
        results = self.apply(attrs.evolve(branch, sides=programs), *given, *constants)
        return tuple(results), tuple(0 if each else None for each in left)


def _select(which: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(which.reshape(*which.shape, *(1,) * (x.ndim - which.ndim)), x, y)


def selected(which: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """An operand of a side of a branch, with the gradient of those items of a batch for which the side is selected.

    That of the others would be zero times their derivative, which may be infinite.
    """
    return _select(which, x, x.detach()) if x.is_floating_point() else x


def _depending(graph: Graph, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs depend on some of the inputs."""
    found = {value for value, has in zip(graph.inputs, inputs, strict=True) if has}
    count = -1
    while count != len(found):  # what a loop inside carries, depends on what its trips leave
        count = len(found)
        for operation in graph.operations:
            if not found.isdisjoint(operation.operands):
                found.update(operation.tensors)
                found.update(operation.operands[1:] if operation.op is NEXT else ())
    return [value in found for value in graph.outputs]


def _refuse_effects(*bodies: Body) -> None:
    for body in bodies:
        for operation in body.graph.operations:
            if operation.effect not in (None, Effect.REGION):
                raise TraceError(
                    f"{operation.name} at {where(operation.source)} stands in a loop or a branch whose predicate "
                    "differs between the items of a vmap, which runs for all items or none. Move it out of the body."
                )
