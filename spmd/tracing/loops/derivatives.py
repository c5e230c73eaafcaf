"""Reverse mode of loops, branches and subprograms: a construct that returns what its derivative reads, too, and that.

The derivative of a loop is a loop in the other direction, whose carries are the cotangents of carries and the sums of
the cotangents of fixed values. What it reads of a trip is stacked by the first loop, unless it is an item or fixed.
It is with respect to the operands that need gradients, and the carries that come to depend on them.
Source: Radul et al., "You Only Linearize Once: Tangents Transpose to Gradients", POPL 2023, for the split.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.core.value_types import is_continuous
from spmd.errors import TraceError
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.regions import NEXT
from spmd.tracing.loops.closed import without_constants
from spmd.tracing.loops.constructs import Body, Branch, Construct, Loop, Subprogram, While
from spmd.tracing.loops.per_rank import again
from spmd.tracing.loops.replay import Apply, retrace, run, transformed
from spmd.tracing.manual.partition import Joint
from spmd.tracing.running import running_trace
from spmd.tracing.source import user_source, where

aten = torch.ops.aten


class From(enum.Enum):
    """Where an operand of a derivative comes from, beside its number there."""

    OPERAND = "an operand"
    RESULT = "a result"
    COTANGENT = "the cotangent of a result"
    ZERO = "zeros like an operand"


@attrs.frozen(eq=False, slots=False)
class Differentiated:
    """A construct that returns what its derivative reads, too.

    Args:
        forward: the construct; its first results are those of the original.
        count: how many results the original has.
        constants: tensors that it takes after the operands of the original.
        backward: the derivative.
        takes: the operands of the derivative, among what `forward` takes and returns.
        inputs: the numbers of the operands whose cotangents are the results of the derivative.
        dependent: the numbers of the results of the original that have cotangents.
        apply: calls a construct with its operands.
    """

    forward: Construct
    count: int
    constants: tuple[torch.Tensor, ...]
    backward: Construct
    takes: tuple[tuple[From, int], ...]
    inputs: tuple[int, ...]
    dependent: tuple[int, ...]
    apply: Apply

    @property
    def again(self) -> Differentiated:
        """The construct `forward` for reverse mode: a second derivative is also that of what the first one reads."""
        needed = [number in self.inputs for number in range(len(self.forward.inputs))]
        return differentiated(self.forward, self.apply, needed)

    @cached_property
    def varied(self) -> tuple[bool, ...]:
        """Which operands of `backward` have derivatives: of what some operators save for theirs, torch has none."""
        dependent = self.again.dependent
        return tuple(kind is not From.RESULT or number in dependent for kind, number in self.takes)


def differentiated(construct: Construct, apply: Apply, needed: Sequence[bool]) -> Differentiated:
    """A construct for reverse mode.

    Args:
        construct: the construct.
        apply: calls a construct with its operands.
        needed: which operands need gradients.

    Raises:
        TraceError: it is a loop whose length is data.
    """
    if isinstance(construct, While):
        raise TraceError(
            f"while_loop at {where(user_source())} is differentiated in reverse mode, which has to keep values of "
            "every trip, and their number is data. Use spmd.fori_loop with integers, spmd.scan, or forward mode: "
            "torch.func.jvp; or torch.no_grad() around the call, where no gradient is needed."
        )
    return construct.once(tuple(needed), lambda: _split(construct, apply, needed))


def _split(construct: Loop | Branch | Subprogram, apply: Apply, needed: Sequence[bool]) -> Differentiated:
    if isinstance(construct, Loop):
        return _loop(construct, apply, needed)
    return _branch(construct, apply, needed) if isinstance(construct, Branch) else _subprogram(construct, apply, needed)


@attrs.frozen(eq=False, slots=False)
class _Derivative:
    """A body with its derivative.

    Args:
        joint: both, as one program.
        constants: the tensors that it takes after the inputs of the body.
        cotangents: by the number of an output that has derivatives, its cotangent.
        gradients: by the number of an input with respect to which it is, its cotangent.
        dependent: the numbers of the outputs that depend on these inputs; cotangents of others have no effect.
        functions: as of the body; also the writes whose derivatives the program lacks.
    """

    joint: Joint
    constants: tuple[torch.Tensor, ...]
    cotangents: dict[int, Value]
    gradients: dict[int, Value]
    dependent: frozenset[int]
    functions: tuple[str, ...]

    @property
    def primals(self) -> tuple[Value, ...]:
        """The inputs of the body, and its constants."""
        return self.joint.graph.inputs[: self.joint.primals]

    @property
    def results(self) -> tuple[Value, ...]:
        """The outputs of the body."""
        return self.joint.graph.outputs[: self.joint.results]

    @cached_property
    def reads(self) -> tuple[Value, ...]:
        """What the derivative may read of the body."""
        return self.joint.reads

    def places(
        self, operands: Iterable[tuple[int, Value]], results: int, first: int = 0
    ) -> tuple[dict[Value, tuple[From, int]], list[Value]]:
        """Where a construct has what the derivative reads.

        Args:
            operands: primals, each with its number among the operands of the construct.
            results: how many results the construct has before the saved values.
            first: the number of the first output of the body that is a result of the construct.

        Returns:
            The places, and the saved values: what is no operand and no result.
        """
        found = {value: (From.OPERAND, number) for number, value in operands}
        for number, value in enumerate(self.results[first:], first):
            found.setdefault(value, (From.RESULT, number))
        saved = [value for value in self.reads if value not in found]
        return found | {value: (From.RESULT, results + number) for number, value in enumerate(saved)}, saved

    @cached_property
    def moved(self) -> frozenset[int]:
        """The numbers of the inputs whose cotangents depend on those of outputs; the cotangents of others are zero."""
        reached, before = set(self.cotangents.values()), 0
        while len(reached) > before:
            before = len(reached)
            for operation in self.joint.graph.operations:
                if not reached.isdisjoint(operation.operands):
                    reached.update(operation.tensors)
                if operation.op is NEXT and operation.operands[0] in reached:
                    reached.add(operation.operands[1])  # in the next trip
        return frozenset(number for number, gradient in self.gradients.items() if gradient in reached)

    @cached_property
    def backward(self) -> tuple[Graph, tuple[Value, ...]]:
        """The derivative, and what it reads of the body: its first inputs."""
        return self.joint.backward(self.reads)


def _derivative(body: Body, inputs: Sequence[int], apply: Apply) -> _Derivative:
    """A body and its derivative by reverse mode, with respect to some inputs, by their numbers."""
    if body.call is None and body.functions:
        raise TraceError(
            f"The second derivative of a loop or a branch at {where(user_source())} is that of {body.functions[0]} in "
            "its body, of which the program has the first one only. Unroll the loop (unroll=True), or write the body "
            "of operators that return new tensors."
        )
    outputs = [number for number, value in enumerate(body.outputs) if is_continuous(value.meta.dtype)]
    count, dependent, functions = len(body.inputs), set[int](), list(body.functions)

    def both(*tensors: torch.Tensor) -> list[torch.Tensor]:
        primals = list(tensors[:count])

        def chosen(*some: torch.Tensor) -> Any:
            given = list(primals)
            for number, x in zip(inputs, some, strict=True):
                given[number] = x
            results = run(body, given, apply)
            dependent.update(transformed(results))
            return tuple(results[number] for number in outputs), results

        vjp: Any = torch.func.vjp
        _, pull, results = vjp(chosen, *(primals[number] for number in inputs), has_aux=True)
        functions.extend(running_trace().functions)
        return [*results, *pull(tuple(tensors[count:]))]

    like = [*body.inputs, *(again(body.outputs[number], cotangent=True) for number in outputs)]
    results = [*body.outputs, *(again(body.inputs[number], cotangent=True) for number in inputs)]
    closed = without_constants(retrace(both, like, results))
    given = closed.body.inputs
    own, cotangents, constants = given[:count], given[count : len(like)], given[len(like) :]
    joint = attrs.evolve(closed.body.graph, inputs=(*own, *constants, *cotangents))
    gradients = joint.outputs[len(body.outputs) :]
    return _Derivative(
        Joint(joint, count + len(constants), len(body.outputs)),
        closed.closed_over,
        dict(zip(outputs, cotangents, strict=True)),
        dict(zip(inputs, gradients, strict=True)),
        frozenset(dependent),
        tuple(dict.fromkeys(functions)),
    )


def _read(body: Body) -> set[int]:
    """The numbers of the inputs that a program reads: not those of the other side, or of which it reads a cast."""
    read = {*body.outputs, *(value for operation in body.graph.operations for value in operation.operands)}
    return {number for number, value in enumerate(body.inputs) if value in read}


def _loop(loop: Loop, apply: Apply, needed: Sequence[bool]) -> Differentiated:
    read = {*range(loop.carries), *_read(loop.body)}
    needed = [need and number in read for number, need in enumerate(needed)]
    while True:
        found = _derivative(loop.body, _numbers(needed), apply)
        left = [need or number in found.dependent for number, need in enumerate(needed[: loop.carries])]
        if left == needed[: loop.carries]:
            break
        needed = [*left, *needed[loop.carries :]]
    joint, primals, sliced = found.joint, found.primals, loop.carries + loop.items
    # Of a trip, the derivative reads items and fixed values as the loop did, and results as it stacked them.
    given = enumerate(primals[loop.carries :], loop.carries)
    known, saved = found.places(given, joint.results, loop.carries)
    pulled, reads = found.backward
    fixed = [value for value in reads if known[value][0] is From.OPERAND and known[value][1] >= sliced]
    stacked = [value for value in reads if value not in fixed]
    carries = [number for number in found.gradients if number < loop.carries]
    later = [number for number in sorted(found.dependent) if number >= loop.carries]
    items = [number for number in found.gradients if loop.carries <= number < sliced and number in found.moved]
    summed = [number for number in found.gradients if number >= sliced and number in found.moved]
    sums = [again(primals[number], cotangent=True) for number in summed]
    totals = list(map(again, sums))
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
    forward = attrs.evolve(loop, body=Body(joint.forward(saved), functions=found.functions))
    backward = Loop(
        Body(body, functions=found.functions),
        len(carries) + len(sums),
        len(stacked) + len(later),
        loop.trips,
        not loop.reverse,
    )
    inputs = (*carries, *summed, *items)
    dependent = tuple(sorted(found.dependent))
    return Differentiated(forward, joint.results, found.constants, backward, takes, inputs, dependent, apply)


def _branch(branch: Branch, apply: Apply, needed: Sequence[bool]) -> Differentiated:
    read = set().union(*map(_read, branch.sides))
    inside = [number for number in _numbers(needed[1:]) if number in read]
    first, second = (_derivative(side, inside, apply) for side in branch.sides)
    dependent = tuple(sorted(first.dependent | second.dependent))
    inside = [number for number in inside if number in first.moved | second.moved]
    count, results = len(branch.sides[0].inputs), first.joint.results
    one = _Side.of(first, count, 0, results)
    other = _Side.of(second, count, len(first.constants), results + len(one.saved))
    constants = (*first.constants, *second.constants)
    zeros = [[_zeros(value) for value in side.saved] for side in (one, other)]
    none: list[Operation] = []
    sides = one.forward(count, constants, none, zeros[1]), other.forward(count, constants, zeros[0], none)
    places = {place: value for side in (one, other) for value, place in side.reads.items()}
    return Differentiated(
        attrs.evolve(branch, sides=sides),
        results,
        constants,
        attrs.evolve(
            branch, sides=(one.backward(places, dependent, inside), other.backward(places, dependent, inside))
        ),
        ((From.OPERAND, 0), *places, *((From.COTANGENT, number) for number in dependent)),
        tuple(1 + number for number in inside),
        dependent,
        apply,
    )


def _subprogram(called: Subprogram, apply: Apply, needed: Sequence[bool]) -> Differentiated:
    read = _read(called.body)
    inputs = tuple(number for number in _numbers(needed) if number in read)
    found = _derivative(called.body, inputs, apply)
    places, saved = found.places(enumerate(found.primals), found.joint.results)
    pulled, reads = found.backward
    dependent = tuple(sorted(found.dependent))
    backward = attrs.evolve(pulled, inputs=(*reads, *(found.cotangents[number] for number in dependent))).verify()
    return Differentiated(
        Subprogram(Body(found.joint.forward(saved), functions=found.functions)),
        found.joint.results,
        found.constants,
        Subprogram(Body(backward, functions=found.functions)),
        (*(places[value] for value in reads), *((From.COTANGENT, number) for number in dependent)),
        inputs,
        dependent,
        apply,
    )


@attrs.frozen(eq=False)
class _Side:
    """A side of a branch with its derivative.

    Args:
        found: both.
        places: where the branch has each of its primals and results, and what else its derivative reads.
        saved: what only its derivative reads.
    """

    found: _Derivative
    places: dict[Value, tuple[From, int]]
    saved: list[Value]

    @classmethod
    def of(cls, found: _Derivative, count: int, constants: int, results: int) -> _Side:
        """A side of `count` inputs, before whose constants and saved values the branch has so many others."""
        numbers = [*range(count), *(count + constants + n for n in range(len(found.constants)))]
        operands = ((1 + number, value) for number, value in zip(numbers, found.primals, strict=True))
        return cls(found, *found.places(operands, results))

    @property
    def reads(self) -> dict[Value, tuple[From, int]]:
        """What its derivative reads, and where the branch has it."""
        return {value: self.places[value] for value in self.found.backward[1]}

    def forward(
        self, count: int, constants: Sequence[torch.Tensor], before: Sequence[Operation], after: Sequence[Operation]
    ) -> Body:
        """The side, with the constants of both, and zeros for what the other one saves, before or after its own."""
        program, results = self.found.joint.forward(self.saved), self.found.joint.results
        own = {place: value for value, place in self.places.items() if place[0] is From.OPERAND}
        inputs = list(self.found.primals[:count])
        for number, tensor in enumerate(constants, count):
            inputs.append(own.get((From.OPERAND, 1 + number)) or Value("constant", TensorMeta.of(tensor)))
        zeros = [[operation.tensors[0] for operation in operations] for operations in (before, after)]
        outputs = (*program.outputs[:results], *zeros[0], *program.outputs[results:], *zeros[1])
        operations = (*program.operations, *before, *after)
        graph = attrs.evolve(program, inputs=tuple(inputs), operations=operations, outputs=outputs).verify()
        return Body(graph, functions=self.found.functions)

    def backward(
        self, places: Mapping[tuple[From, int], Value], dependent: Sequence[int], inside: Sequence[int]
    ) -> Body:
        """Its derivative, of what the derivatives of both sides read, and of the cotangents of some results.

        It returns the cotangents of the inputs with the numbers `inside`.
        """
        program, reads = self.found.backward
        held = {self.places[value]: value for value in reads}
        taken = (held.get(place) or again(value) for place, value in places.items())
        cotangents = (self.found.cotangents[number] for number in dependent)
        gradients = tuple(self.found.gradients[number] for number in inside)
        graph = attrs.evolve(program, inputs=(*taken, *cotangents), outputs=gradients).verify()
        return Body(graph, functions=self.found.functions)


def _numbers(which: Sequence[bool]) -> list[int]:
    return [number for number, each in enumerate(which) if each]


def _zeros(value: Value) -> Operation:
    meta = value.meta
    return Operation(aten.full.default, (list(meta.shape), 0), {"dtype": meta.dtype}, (again(value),))
