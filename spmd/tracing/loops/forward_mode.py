"""Forward mode of loops and branches: a construct that computes tangents beside values.

Operands without a tangent get none in it, but for the carries that come to depend on others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from spmd.core.value_types import is_continuous
from spmd.tracing.loops.closed import Closed
from spmd.tracing.loops.constructs import Body, Branch, Construct, Loop, Subprogram, While, with_equal_inputs
from spmd.tracing.loops.per_rank import again
from spmd.tracing.loops.replay import Apply, body_of, run, transformed


@attrs.frozen(eq=False)
class Dual:
    """A construct that computes tangents beside values.

    Args:
        construct: it takes and returns groups of values, each followed by their tangents.
        constants: tensors that it takes after these.
        moves, left: which operands and results of the original have tangents in it.
        starts, ends: where the groups of operands and results begin, but for the first.
        dependent: the numbers of the results whose tangents are not zero anyway.
    """

    construct: Construct
    constants: tuple[torch.Tensor, ...]
    moves: tuple[bool, ...]
    left: tuple[bool, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    dependent: frozenset[int]

    @classmethod
    def of(cls, construct: Construct, moves: Sequence[bool], apply: Apply) -> Dual:
        """Make that of a construct of which some operands have tangents; `apply` calls a construct."""
        assert not isinstance(construct, Subprogram), "layers are traced each time in forward mode"
        return _branch(construct, moves, apply) if isinstance(construct, Branch) else _loop(construct, moves, apply)

    def tangents(
        self, operands: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], apply: Apply
    ) -> tuple[torch.Tensor | None, ...]:
        """The tangents of results, for those of operands; None of results that have none."""
        triples = zip(operands, tangents, self.moves, strict=True)
        pairs = [(x, torch.zeros_like(x) if moves and t is None else t) for x, t, moves in triples]
        results = apply(self.construct, *_doubled(pairs, self.moves, self.starts), *self.constants)
        found = enumerate(_apart(results, self.left, self.ends))
        return tuple(tangent if number in self.dependent else None for number, (_, tangent) in found)


def _branch(branch: Branch, moves: Sequence[bool], apply: Apply) -> Dual:
    left = tuple(is_continuous(meta.dtype) for meta in branch.results)
    (first, one), (second, other) = (_program(side, moves[1:], left, (), (), apply) for side in branch.sides)
    shared = len(first.body.inputs) - len(first.closed_over)
    made = attrs.evolve(branch, sides=with_equal_inputs(shared, first.body, second.body))
    return Dual(made, (*first.closed_over, *second.closed_over), tuple(moves), left, (), (), one | other)


def _loop(loop: Loop | While, moves: Sequence[bool], apply: Apply) -> Dual:
    carries, items = loop.carries, loop.items if isinstance(loop, Loop) else 0
    starts, ends = (carries, carries + items), (carries,)
    of_rows = [is_continuous(meta.dtype) for meta in loop.results[carries:]]
    while True:
        left = (*moves[:carries], *of_rows)
        closed, dependent = _program(loop.body, moves, left, starts, ends, apply)
        found = [each or (number < carries and number in dependent) for number, each in enumerate(moves)]
        if found == list(moves):
            break
        moves = found
    made: Construct
    carried, sliced = (count + sum(moves[first : first + count]) for first, count in ((0, carries), (carries, items)))
    if isinstance(loop, Loop):
        made = attrs.evolve(loop, body=closed.body, carries=carried, items=sliced)
    else:
        condition = _with_tangents(loop.condition, moves, starts, len(closed.closed_over), closed.body)
        made = While(condition, closed.body, carried)
    return Dual(made, closed.closed_over, tuple(moves), left, starts, ends, dependent)


def _program(
    body: Body,
    moves: Sequence[bool],
    left: Sequence[bool],
    starts: Sequence[int],
    ends: Sequence[int],
    apply: Apply,
) -> tuple[Closed, frozenset[int]]:
    """A program that also computes tangents, and the numbers of the outputs that depend on what has tangents.

    Args:
        body: the program of values.
        moves, left: which inputs and outputs have tangents.
        starts, ends: where the groups of its inputs and outputs begin; the tangents of a group follow it.
        apply: as for `replay`.
    """
    dependent = set[int]()
    numbers = [number for number, each in enumerate(moves) if each]

    def both(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = _apart(tensors, moves, starts)

        def chosen(*some: torch.Tensor) -> Any:
            primals = [x for x, _ in given]
            for number, x in zip(numbers, some, strict=True):
                primals[number] = x
            results = run(body, primals, apply)
            dependent.update(transformed(results))
            return tuple(x for x in results if is_continuous(x.dtype)), results

        primals, tangents = (tuple(given[number][side] for number in numbers) for side in (0, 1))
        jvp: Any = torch.func.jvp
        _, moved, results = jvp(chosen, primals, tangents, has_aux=True)
        rest = iter(moved)
        return _doubled([(x, next(rest) if is_continuous(x.dtype) else None) for x in results], left, ends)

    inputs, outputs = ([(value, value) for value in values] for values in (body.inputs, body.outputs))
    closed = body_of(both, _doubled(inputs, moves, starts), _doubled(outputs, left, ends), body.functions)
    return closed, frozenset(dependent)


def _with_tangents(body: Body, moves: Sequence[bool], starts: Sequence[int], constants: int, like: Body) -> Body:
    """A program with the inputs of another one, of which it does not read the tangents and the last, constants."""
    pairs = [(value, again(value)) for value in body.inputs]
    last = like.inputs[len(like.inputs) - constants :]
    return Body(attrs.evolve(body.graph, inputs=(*_doubled(pairs, moves, starts), *map(again, last))))


def _groups(count: int, starts: Sequence[int]) -> Iterator[range]:
    for start, stop in itertools.pairwise((0, *starts, count)):
        yield range(start, stop)


def _doubled(pairs: Sequence[tuple[Any, Any]], moves: Sequence[bool], starts: Sequence[int]) -> list[Any]:
    """Values and tangents in the order of operands: of each group first the values."""
    found: list[Any] = []
    for group in _groups(len(pairs), starts):
        found += [pairs[number][0] for number in group]
        found += [pairs[number][1] for number in group if moves[number]]
    return found


def _apart(flat: Sequence[Any], moves: Sequence[bool], starts: Sequence[int]) -> list[tuple[Any, Any]]:
    """The inverse of `_doubled`; a tangent is None where there is none."""
    found: list[tuple[Any, Any]] = []
    rest = iter(flat)
    for group in _groups(len(moves), starts):
        values = [next(rest) for _ in group]
        found += [(x, next(rest) if moves[number] else None) for number, x in zip(group, values, strict=True)]
    return found
