"""Splits a program that computes results and their gradients into a forward and a backward program.

As in the default partition of torch's AOTAutograd, what the results need is forward, and the backward program reads
what it needs of that: no operation runs twice, but for views and constants, which cost less than to keep them. In
manual regions whose shards differ in shape between ranks, ranks may need other values, so nothing is kept there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import attrs

from spmd.collectives.manual import ManualAxes
from spmd.ir.dataflow import independent_values
from spmd.ir.effects import Effect
from spmd.ir.graph import Graph, Operation, Value, freeze
from spmd.ir.regions import BEGINS, MERGE, OTHERWISE
from spmd.tracing.manual.correspondence import Correspondence, are_same


@attrs.frozen(eq=False)
class _Unit:
    """An operation, or all operations of a loop or a branch: they run together.

    Args:
        operations: in order of execution.
        operands: what they read of other ones.
        tensors: what others read of them.
    """

    operations: tuple[Operation, ...]
    operands: tuple[Value, ...]
    tensors: tuple[Value, ...]

    @property
    def effects(self) -> list[Operation]:
        """The operations with effects."""
        return [operation for operation in self.operations if operation.effect not in (None, Effect.REGION)]

    @property
    def is_light(self) -> bool:
        """Whether it costs less to compute its results again than to keep them."""
        (first, *others) = self.operations
        return not others and first.effect is None and (first.is_view or not first.operands)


def _units(graph: Graph) -> list[_Unit]:
    """The operations of a program, and its loops and branches."""
    regions, found = graph.regions, list[_Unit]()
    if not regions:
        return [_Unit((operation,), operation.operands, operation.tensors) for operation in graph.operations]
    together: list[Operation] = []
    for operation, after in itertools.zip_longest(graph.operations, graph.operations[1:]):
        together.append(operation)
        goes_on = regions.around(operation) is not None or operation.op in (*BEGINS, OTHERWISE)
        if goes_on or (after is not None and after.op is MERGE):
            continue
        made = [value for each in together for value in each.tensors]
        read = [value for each in together for value in each.operands]
        left = tuple(value for value in made if regions.home(value) is None)
        found.append(_Unit(tuple(together), tuple(v for v in dict.fromkeys(read) if v not in made), left))
        together = []
    return found


@attrs.frozen(eq=False, slots=False)
class Joint:
    """A program of results and gradients.

    Args:
        graph: its inputs are primals, followed by cotangents; its outputs are results, followed by gradients.
        primals, results: how many of them there are.
        is_uneven: whether ranks have other programs, so that per-rank values are not kept.
    """

    graph: Graph
    primals: int
    results: int
    is_uneven: bool = False

    @cached_property
    def _units(self) -> list[_Unit]:
        return _units(self.graph)

    @cached_property
    def others(self) -> tuple[tuple[Joint, Mapping[Value, Value]], ...]:
        """The programs of ranks with other local shapes, each with the values that correspond to those of this one."""
        if self.graph.variants is None:
            return ()
        found = self.graph.variants.graphs.values()
        return tuple(
            (attrs.evolve(self, graph=graph, is_uneven=True), Correspondence(self.graph, graph, coordinate).outside)
            for coordinate, graph in found
        )

    def with_gradients(self, numbers: Sequence[int]) -> Joint:
        """This program with some of its gradients only, by their numbers."""

        def chosen(graph: Graph) -> Graph:
            gradients = (graph.outputs[self.results + number] for number in numbers)
            variants = graph.variants and graph.variants.map(chosen)
            return attrs.evolve(graph, outputs=(*graph.outputs[: self.results], *gradients), variants=variants)

        return attrs.evolve(self, graph=chosen(self.graph))

    def forward(self, saved: Sequence[Value]) -> Graph:
        """The program from the primals to the results, followed by the values `saved`."""
        inputs, results = self.graph.inputs[: self.primals], self.graph.outputs[: self.results]
        program = _program(self.graph, inputs, self._forward_operations(), (*results, *saved))
        return self._with_variants(program, lambda other, same: other.forward([same[value] for value in saved]))

    def _with_variants(self, program: Graph, make: Callable[[Joint, Mapping[Value, Value]], Graph]) -> Graph:
        """A part of this program, with the parts of the programs of other ranks that `make` makes."""
        if self.graph.variants is None:
            return program
        made = [make(*other) for other in self.others]
        pairs = zip(self.graph.variants.graphs.items(), made, strict=True)
        graphs = {key: (coordinate, graph) for (key, (coordinate, _)), graph in pairs}
        return attrs.evolve(program, variants=attrs.evolve(self.graph.variants, graphs=graphs))

    @property
    def reads(self) -> tuple[Value, ...]:
        """What the backward program reads: primals, results and other values of the forward program."""
        forward = set(self._forward_operations())
        inside = self._per_rank() if self.is_uneven or self.graph.variants is not None else ()
        light = {value for unit in self._units if unit.is_light for value in unit.tensors}
        kept = {value for operation in forward for value in operation.tensors} - light - set(inside)

        known = {*self.graph.inputs, *self.graph.outputs[: self.results]}
        found = dict.fromkeys(self._backward_operations((known | kept).__contains__)[1])
        for other, same in self.others:
            its = {twin: value for value, twin in same.items()}
            found |= dict.fromkeys(its[value] for value in other.reads)
        return tuple(found)

    def _per_rank(self) -> set[Value]:
        """The values in manual regions, and those that depend on no input, which may be in one: they are not kept."""
        fixed = {value for value, _ in self.graph.constants}
        found, free = {*ManualAxes.of(self.graph), *fixed}, independent_values(self.graph)
        for operation in self.graph.operations:
            if operation.effect is not None:
                continue
            if fixed.issuperset(operation.operands):
                fixed.update(operation.tensors)
                found.update(operation.tensors)
            elif free.issuperset(operation.tensors) and found.issuperset(operation.operands):
                found.update(operation.tensors)
        return found

    def backward(self, available: Iterable[Value]) -> tuple[Graph, tuple[Value, ...]]:
        """The program to the gradients.

        Args:
            available: primals, and values of the forward program.

        Returns:
            The program, and what it reads of `available`: its first inputs. The others are the cotangents.
        """
        known = set(available)
        operations, reads = self._backward_operations(known.__contains__)
        for other, same in self.others:
            its = {twin: value for value, twin in same.items()}
            needed = other._backward_operations({same[value] for value in known if value in same}.__contains__)[1]
            reads = tuple(dict.fromkeys((*reads, *(its[value] for value in needed))))
        return self._backward_from(reads, operations), reads

    def _backward_from(self, reads: Sequence[Value], operations: Sequence[Operation]) -> Graph:
        inputs = (*reads, *self.graph.inputs[self.primals :])
        program = _program(self.graph, inputs, operations, self.graph.outputs[self.results :])

        def of_rank(other: Joint, same: Mapping[Value, Value]) -> Graph:
            given = [same[value] for value in reads]
            return other._backward_from(given, other._backward_operations(set(given).__contains__)[0])

        return self._with_variants(program, of_rank)

    def corresponding(self, other: Joint) -> dict[Value, Value]:
        """The values of another program of the same function, for those of this one that it computes in the same way.

        Both compute the results first; after that they may differ, as their cotangents do.
        """
        found = dict(zip(self.graph.inputs[: self.primals], other.graph.inputs[: other.primals], strict=True))
        constants = zip(self.graph.constants, other.graph.constants, strict=False)
        found |= {mine: its for (mine, tensor), (its, twin) in constants if are_same(tensor, twin)}
        for mine, its in zip(self.graph.operations, other.graph.operations, strict=False):
            same = mine.substitute(found)
            calls = [freeze((operation.args, dict(operation.kwargs))) for operation in (same, its)]
            if mine.op is not its.op or calls[0] != calls[1] or len(mine.results) != len(its.results):
                break
            found |= {a: b for a, b in zip(mine.results, its.results, strict=True) if a is not None and b is not None}
        return found

    def _late(self) -> set[Value]:
        """The values that depend on cotangents."""
        late = set(self.graph.inputs[self.primals :])
        for unit in self._units:
            if not late.isdisjoint(unit.operands):
                late.update(unit.tensors)
        return late

    def _forward_operations(self) -> list[Operation]:
        """The operations that the results need, and those with effects that need no cotangent.

        Collectives of a backward pass stay in it: one that sends again what the forward pass has sent, does so in order
        that nothing is kept.
        """
        late, live = self._late(), set(self.graph.outputs[: self.results])
        found = []
        for unit in reversed(self._units):
            effects = unit.effects if late.isdisjoint(unit.operands) else []
            if not all(map(_is_sent_backward, effects)) or not live.isdisjoint(unit.tensors):
                live.update(unit.operands)
                found.append(unit.operations)
        return [operation for operations in reversed(found) for operation in operations]

    def _backward_operations(self, stops: Callable[[Value], bool]) -> tuple[list[Operation], tuple[Value, ...]]:
        """The operations that the gradients need, from values at which the search stops, and these values."""
        late = self._late()
        wanted = {value for value in self.graph.outputs[self.results :] if not stops(value)}
        reads = dict.fromkeys(value for value in self.graph.outputs[self.results :] if stops(value))
        found = []
        for unit in reversed(self._units):
            has_effect = bool(unit.effects) and not late.isdisjoint(unit.operands)
            if has_effect or not wanted.isdisjoint(unit.tensors):
                found.append(unit.operations)
                for value in unit.operands:
                    reads.update({value: None} if stops(value) else {})
                    wanted.update([] if stops(value) else [value])
        cotangents = self.graph.inputs[self.primals :]
        operations = [operation for together in reversed(found) for operation in together]
        return operations, tuple(value for value in reads if value not in cotangents)


def _is_sent_backward(operation: Operation) -> bool:
    source = operation.source
    return operation.effect is Effect.COLLECTIVE and source is not None and source.backward


def _program(joint: Graph, inputs: Sequence[Value], operations: Sequence[Operation], outputs: Sequence[Value]) -> Graph:
    used = {*outputs, *(value for operation in operations for value in operation.operands)}
    constants = tuple((value, tensor) for value, tensor in joint.constants if value in used and value not in inputs)
    again = {value: Value(f"{value.name}_again", value.meta) for value in inputs}  # of an operation with other results
    made = [attrs.evolve(o, results=tuple(again.get(v, v) if v else None for v in o.results)) for o in operations]
    return Graph(tuple(inputs), constants, tuple(made), tuple(outputs)).verify()
