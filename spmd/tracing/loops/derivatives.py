"""Reverse mode of loops and branches: a construct that also returns what its derivative reads, and the derivative.

The derivative of a loop is a loop in the other direction, whose carries are the cotangents of carries and the sums of
the cotangents of fixed values. What it reads of a trip is stacked by the first loop, unless it is an item or fixed.
Source: Radul et al., "You Only Linearize Once: Tangents Transpose to Gradients", POPL 2023, for the split.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.ir.graph import Graph, Operation, Value
from spmd.tracing.loops.closed import without_constants
from spmd.tracing.loops.constructs import Branch, Construct, Loop
from spmd.tracing.loops.replay import Apply, replay, retrace
from spmd.tracing.manual.partition import Joint
from spmd.tracing.source import user_source, where

aten = torch.ops.aten


class From(enum.Enum):
    """Where an operand of a derivative comes from, beside its number there."""

    OPERAND = "an operand"
    RESULT = "a result"
    COTANGENT = "the cotangent of a result"
    ZERO = "zeros like an operand"


@attrs.frozen(eq=False)
class Differentiated:
    """A construct that returns what its derivative reads, too.

    Args:
        forward: the construct; its first results are those of the original.
        count: how many results the original has.
        constants: tensors that it takes after the operands of the original.
        backward: the derivative.
        takes: the operands of the derivative, among what `forward` takes and returns.
        inputs: the numbers of the operands whose cotangents are the results of the derivative.
    """

    forward: Construct
    count: int
    constants: tuple[torch.Tensor, ...]
    backward: Construct
    takes: tuple[tuple[From, int], ...]
    inputs: tuple[int, ...]


def differentiated(construct: Construct, apply: Apply) -> Differentiated:
    """A construct for reverse mode.

    Raises:
        TraceError: it is a loop whose length is data.
    """
    if isinstance(construct, Loop):
        return _loop(construct, apply)
    if isinstance(construct, Branch):
        return _branch(construct, apply)
    raise TraceError(
        f"while_loop at {where(user_source())} is differentiated in reverse mode, which has to keep values of every "
        "trip, and their number is data. Use spmd.fori_loop with integers, spmd.scan, or forward mode: torch.func.jvp."
    )


@attrs.frozen(eq=False)
class _Derivative:
    """A body with its derivative.

    Args:
        joint: both, as one program.
        constants: the tensors that it takes after the inputs of the body.
        cotangents: by the number of a differentiable output, its cotangent.
        gradients: by the number of a differentiable input, its cotangent.
    """

    joint: Joint
    constants: tuple[torch.Tensor, ...]
    cotangents: dict[int, Value]
    gradients: dict[int, Value]

    @property
    def primals(self) -> tuple[Value, ...]:
        """The inputs of the body, and its constants."""
        return self.joint.graph.inputs[: self.joint.primals]

    @property
    def results(self) -> tuple[Value, ...]:
        """The outputs of the body."""
        return self.joint.graph.outputs[: self.joint.results]


def _derivative(graph: Graph, apply: Apply) -> _Derivative:
    """A body and its derivative by reverse mode."""
    outputs, inputs, count = _differentiable(graph.outputs), _differentiable(graph.inputs), len(graph.inputs)

    def both(*tensors: torch.Tensor) -> list[torch.Tensor]:
        primals = list(tensors[:count])

        def chosen(*some: torch.Tensor) -> Any:
            given = list(primals)
            for number, x in zip(inputs, some, strict=True):
                given[number] = x
            results = replay(graph, given, apply)
            return tuple(results[number] for number in outputs), results

        vjp: Any = torch.func.vjp
        _, pull, results = vjp(chosen, *(primals[number] for number in inputs), has_aux=True)
        return [*results, *pull(tuple(tensors[count:]))]

    like = [value.meta for value in (*graph.inputs, *(graph.outputs[number] for number in outputs))]
    closed = without_constants(retrace(both, like))
    given = closed.graph.inputs
    own, cotangents, constants = given[:count], given[count : len(like)], given[len(like) :]
    joint = attrs.evolve(closed.graph, inputs=(*own, *constants, *cotangents))
    gradients = joint.outputs[len(graph.outputs) :]
    return _Derivative(
        Joint(joint, count + len(constants), len(graph.outputs)),
        closed.closed_over,
        dict(zip(outputs, cotangents, strict=True)),
        dict(zip(inputs, gradients, strict=True)),
    )


def _differentiable(values: Sequence[Value]) -> list[int]:
    """The numbers of those that have derivatives."""
    kinds = [value.meta.dtype.is_floating_point or value.meta.dtype.is_complex for value in values]
    return [number for number, kind in enumerate(kinds) if kind]


def _loop(loop: Loop, apply: Apply) -> Differentiated:
    found = _derivative(loop.body, apply)
    joint, primals, sliced = found.joint, found.primals, loop.carries + loop.items
    # Of a trip, the derivative reads items and fixed values as the loop did, and results as it stacked them.
    known = {value: (From.OPERAND, number) for number, value in enumerate(primals) if number >= loop.carries}
    for number, value in enumerate(found.results[loop.carries :], loop.carries):
        known.setdefault(value, (From.RESULT, number))
    saved = [value for value in joint.reads if value not in known]
    known |= {value: (From.RESULT, joint.results + number) for number, value in enumerate(saved)}
    pulled, reads = joint.backward(joint.reads)
    fixed = [value for value in reads if known[value][0] is From.OPERAND and known[value][1] >= sliced]
    stacked = [value for value in reads if value not in fixed]
    carries = [number for number in found.cotangents if number < loop.carries]
    later = [number for number in found.cotangents if number >= loop.carries]
    items = [number for number in found.gradients if loop.carries <= number < sliced]
    summed = [number for number in found.gradients if number >= sliced]
    sums = [Value("sum", primals[number].meta) for number in summed]
    totals = [Value("total", total.meta) for total in sums]
    pairs = zip(sums, (found.gradients[number] for number in summed), totals, strict=True)
    added = [Operation(aten.add.Tensor, (total, gradient), {}, (new,)) for total, gradient, new in pairs]
    body = Graph(
        (
            *(found.cotangents[number] for number in carries),
            *sums,
            *stacked,
            *(found.cotangents[number] for number in later),
            *fixed,
        ),
        (),
        (*pulled.operations, *added),
        (*(found.gradients[n] for n in carries), *totals, *(found.gradients[n] for n in items)),
    ).verify()
    takes = (
        *((From.COTANGENT, number) for number in carries),
        *((From.ZERO, number) for number in summed),
        *(known[value] for value in stacked),
        *((From.COTANGENT, number) for number in later),
        *(known[value] for value in fixed),
    )
    forward = attrs.evolve(loop, body=joint.forward(saved))
    backward = Loop(body, len(carries) + len(sums), len(stacked) + len(later), loop.trips, not loop.reverse)
    return Differentiated(forward, joint.results, found.constants, backward, takes, (*carries, *summed, *items))


def _branch(branch: Branch, apply: Apply) -> Differentiated:
    found = [_derivative(side, apply) for side in branch.sides]
    count, results = len(branch.sides[0].inputs), len(branch.sides[0].outputs)
    constants = [tensor for one in found for tensor in one.constants]
    slots: list[tuple[From, int]] = []
    forward, backward = [], []
    saved = []
    known: list[dict[Value, tuple[From, int]]] = []
    before = 0
    for one in found:
        places = [*range(count), *range(count + before, count + before + len(one.constants))]
        before += len(one.constants)
        known.append({value: (From.OPERAND, 1 + n) for value, n in zip(one.primals, places, strict=True)})
        for number, value in enumerate(one.results):
            known[-1].setdefault(value, (From.RESULT, number))
        saved.append([value for value in one.joint.reads if value not in known[-1]])
    start = results
    for number, values in enumerate(saved):
        known[number] |= {value: (From.RESULT, start + n) for n, value in enumerate(values)}
        start += len(values)
    pulls = [one.joint.backward(one.joint.reads) for one in found]
    for number, (_, reads) in enumerate(pulls):
        slots += [known[number][value] for value in reads]
    slots = list(dict.fromkeys(slots))
    for number, (one, (pulled, reads)) in enumerate(zip(found, pulls, strict=True)):
        others = [value for n, values in enumerate(saved) for value in values if n != number]
        program = one.joint.forward(saved[number])
        zeros = [_zeros(value) for value in others]
        own, extra = program.outputs[:results], program.outputs[results:]
        blank = [operation.tensors[0] for operation in zeros]
        outputs = (*own, *extra, *blank) if number == 0 else (*own, *blank, *extra)
        given = dict(zip(((From.OPERAND, 1 + n) for n in range(count)), one.primals, strict=False))
        given |= {place: value for value, place in known[number].items() if place[0] is From.OPERAND}
        inputs = tuple(
            given.get((From.OPERAND, 1 + n)) or Value("constant", TensorMeta.of(constants[n - count]))
            for n in range(count + len(constants))
        )
        forward.append(attrs.evolve(program, inputs=inputs, operations=(*program.operations, *zeros), outputs=outputs))
        held = {known[number][value]: value for value in reads}
        taken = tuple(held.get(slot) or Value("other", _meta(slot, found, known)) for slot in slots)
        cotangents = pulled.inputs[len(reads) :]
        backward.append(attrs.evolve(pulled, inputs=(*taken, *cotangents)))
    takes = ((From.OPERAND, 0), *slots, *((From.COTANGENT, number) for number in found[0].cotangents))
    return Differentiated(
        Branch((forward[0].verify(), forward[1].verify())),
        results,
        tuple(constants),
        Branch((backward[0].verify(), backward[1].verify())),
        takes,
        tuple(1 + number for number in found[0].gradients),
    )


def _meta(slot: tuple[From, int], found: Sequence[_Derivative], known: Sequence[dict[Value, Any]]) -> TensorMeta:
    return next(value.meta for places in known for value, place in places.items() if place == slot)


def _zeros(value: Value) -> Operation:
    meta = value.meta
    return Operation(aten.full.default, (list(meta.shape), 0), {"dtype": meta.dtype}, (Value("zeros", meta),))
