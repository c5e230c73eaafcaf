"""Forward mode of loops and branches: a construct that computes tangents beside values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from spmd.tracing.loops.closed import Closed
from spmd.tracing.loops.constructs import Body, Branch, Construct, Loop, While, with_equal_inputs
from spmd.tracing.loops.per_rank import again
from spmd.tracing.loops.replay import Apply, body_of, run


def dual(
    construct: Construct, operands: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], apply: Apply
) -> tuple[torch.Tensor | None, ...]:
    """The tangents of the results of a construct, for those of its operands."""
    pairs = [(x, torch.zeros_like(x) if t is None else t) for x, t in zip(operands, tangents, strict=True)]
    if isinstance(construct, Branch):
        sides = [_dual(side, (), (), apply) for side in construct.sides]
        given = _doubled(pairs[1:], ())
        ends: tuple[int, ...] = ()
        programs = with_equal_inputs(len(given), sides[0].body, sides[1].body)
        constants = (*sides[0].closed_over, *sides[1].closed_over)
        results = apply(Branch(programs), operands[0], *given, *constants)
    else:
        items = construct.items if isinstance(construct, Loop) else 0
        starts, ends = (construct.carries, construct.carries + items), (construct.carries,)
        body = _dual(construct.body, starts, ends, apply)
        inside = construct.body.inputs
        carries, sliced = (
            len(_doubled([(v, v) for v in part], ())) for part in (inside[: starts[0]], inside[starts[0] : starts[1]])
        )
        made: Construct
        if isinstance(construct, Loop):
            made = attrs.evolve(construct, body=body.body, carries=carries, items=sliced)
        else:
            condition = _with_tangents(construct.condition, starts, len(body.closed_over), body.body)
            made = While(condition, body.body, carries)
        results = apply(made, *_doubled(pairs, starts), *body.closed_over)
    kinds = [(meta, None) for meta in construct.results]
    return tuple(tangent for _, tangent in _apart(results, kinds, ends))


def _dual(body: Body, starts: Sequence[int], ends: Sequence[int], apply: Apply) -> Closed:
    """A program that also computes the tangents of its outputs.

    Args:
        body: the program.
        starts, ends: where the groups of its inputs and outputs begin; the tangents of a group follow it.
        apply: as for `replay`.
    """
    numbers = [n for n, value in enumerate(body.inputs) if _has_tangent(value)]
    inputs = [(value, value) for value in body.inputs]

    def both(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = list(_apart(tensors, inputs, starts))

        def chosen(*some: torch.Tensor) -> Any:
            primals = [x for x, _ in given]
            for number, x in zip(numbers, some, strict=True):
                primals[number] = x
            results = run(body, primals, apply)
            return tuple(x for x in results if _has_tangent(x)), results

        primals, tangents = (tuple(given[number][side] for number in numbers) for side in (0, 1))
        jvp: Any = torch.func.jvp
        _, moved, results = jvp(chosen, primals, tangents, has_aux=True)
        rest = iter(moved)
        return _doubled([(x, next(rest) if _has_tangent(x) else None) for x in results], ends)

    results = _doubled([(value, value) for value in body.outputs], ends)
    return body_of(both, _doubled(inputs, starts), results, body.functions)


def _with_tangents(body: Body, starts: Sequence[int], constants: int, like: Body) -> Body:
    """A program with the inputs of another one, of which it does not read the tangents and the last, constants."""
    pairs = [(value, again(value)) for value in body.inputs]
    last = like.inputs[len(like.inputs) - constants :]
    return Body(attrs.evolve(body.graph, inputs=(*_doubled(pairs, starts), *map(again, last))))


def _has_tangent(x: Any) -> bool:
    """Test for a tensor, a value or a meta of floating-point or complex dtype."""
    dtype = getattr(x, "meta", x).dtype if not isinstance(x, torch.Tensor) else x.dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def _groups(count: int, starts: Sequence[int]) -> Iterator[range]:
    for start, stop in itertools.pairwise((0, *starts, count)):
        yield range(start, stop)


def _doubled(pairs: Sequence[tuple[Any, Any]], starts: Sequence[int]) -> list[Any]:
    """Values and tangents in the order of operands: of each group first the values."""
    found: list[Any] = []
    for group in _groups(len(pairs), starts):
        found += [pairs[number][0] for number in group]
        found += [pairs[number][1] for number in group if _has_tangent(pairs[number][0])]
    return found


def _apart(flat: Sequence[Any], kinds: Sequence[tuple[Any, Any]], starts: Sequence[int]) -> list[tuple[Any, Any]]:
    """The inverse of `_doubled`; a tangent is None where there is none."""
    found: list[tuple[Any, Any]] = []
    rest = iter(flat)
    for group in _groups(len(kinds), starts):
        values = [next(rest) for _ in group]
        found += [(x, next(rest) if _has_tangent(kinds[n][0]) else None) for n, x in zip(group, values, strict=True)]
    return found
