"""Python source for ranks that run one program in lockstep in one process: each value is computed once per instance.

Ranks that hold equal tensors share one, an instance. The code computes what lies between two operations with effects
(collectives, random operators) for one instance after the other, in a loop, and what has a single instance, outside of
any loop: as it depends on nothing that varies, it stands before. A variable `v` holds an instance, a list `vs` all
instances of a value that is used outside of the loop that computes it.

The code is a generator that suspends at every effect: `results = yield op, calls, positions` passes a call for each
instance, and the number of the instance for each rank, to the runtime, and is sent a list of the results of all ranks,
which it empties, so that only the program holds references to them. It finally yields None, the instances of each
output, and their positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
import torch

from spmd.collectives.local import LOCALS, Local, bind_local
from spmd.core.mesh import Mesh
from spmd.core.single_threaded import single_threaded
from spmd.ir.effects import Effect
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.regions import BRANCH, PROCEED, STRUCTURE, WHILE
from spmd.runtime.codegen import Generated, ProgramWriter, aliases_of, last_uses, last_uses_of, unused_inputs
from spmd.runtime.ranges import InRanges, common
from spmd.runtime.region_code import RegionCode
from spmd.runtime.varying import Axes, operand_axes

Running: TypeAlias = Generator[tuple[Any, Sequence[Any], Any], list[Any], None]
"""A program that is running."""


@attrs.frozen(eq=False)
class Instances:
    """The instances of values that vary along the same axes.

    Args:
        ranks: the first rank of each instance.
        positions: for each rank, the number of its instance.
    """

    ranks: tuple[int, ...]
    positions: Mapping[int, int]

    @property
    def is_single(self) -> bool:
        """Whether all ranks hold the same tensor."""
        return len(self.ranks) == 1


@attrs.frozen(eq=False)
class LockstepProgram:
    """The program of ranks that run in lockstep.

    Args:
        generated: the function, which takes for each input a list of its instances, and its source.
        inputs: the instances of each input.
    """

    generated: Generated
    inputs: tuple[Instances, ...]

    def start(self, shards: Sequence[Sequence[torch.Tensor]], numbers: Sequence[float] = ()) -> Running:
        """The program, not yet running.

        Args:
            shards: for each input the shards of all ranks, in rank order.
            numbers: those of the call.
        """
        return self.generated.function(  # type: ignore[no-any-return]
            [
                list(held) if len(held) == count else [held[rank] for rank in ranks]
                for held, (ranks, count) in zip(shards, self._ranks, strict=True)
            ],
            numbers,
        )

    @cached_property
    def _ranks(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """The ranks of which each input has instances, and how many they are."""
        return tuple((instances.ranks, len(instances.ranks)) for instances in self.inputs)


@single_threaded()
def generate_lockstep(
    graph: Graph,
    mesh: Mesh,
    ranks: Sequence[int],
    varying: Mapping[Value, Axes] = MappingProxyType({}),
    *,
    ranged: bool = False,
    takes_turns: bool = False,
) -> LockstepProgram:
    """Compile the program that some ranks run.

    Args:
        graph: the program.
        mesh: the mesh.
        ranks: the ranks, ascending.
        varying: the axes along which values vary; values vary along all axes by default.
        ranged: whether it opens ranges of `torch.profiler`.
        takes_turns: whether there are other programs. Then no range is open while others run: those of an effect are
            the runtime's to open, by `InRanges`.
    """
    writer = _Lockstep(graph, mesh, tuple(ranks), varying, ranged, ranged and takes_turns)
    return LockstepProgram(writer.generated(), tuple(map(writer.instances, graph.inputs)))


@attrs.frozen(eq=False)
class _Segment:
    """Operations without effects on the same instances, or one operation with an effect.

    Or a branch, or a loop, in which ranks part: it runs for one instance after the other.
    """

    instances: Instances
    operations: tuple[Operation, ...]


class _Lockstep:
    """The source under construction."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        ranks: tuple[int, ...],
        varying: Mapping[Value, Axes],
        ranged: bool,
        takes_turns: bool,
    ) -> None:
        self.takes_turns = takes_turns
        self.graph, self.mesh, self.ranks = graph, mesh, ranks
        every = frozenset(mesh.names)
        values = [*graph.inputs, *(value for operation in graph.operations for value in operation.tensors)]
        self.varying = {value: varying.get(value, every) for value in values}
        self.varying.update((value, frozenset()) for value, _ in graph.constants)
        self.known: dict[tuple[int, ...], Instances] = {}
        self.by_axes: dict[Axes, Instances] = {}
        self.segments = [segment for region in self.regions() for segment in region]
        operations = [operation for segment in self.segments for operation in segment.operations]
        self.dying = last_uses(graph, operations)
        self.writer = ProgramWriter(graph, ranged)
        self.lines = self.writer.lines
        self.code = RegionCode(self.writer, graph, self.name, self.given, self.each, self.free)

    def along(self, axes: Axes) -> Instances:
        """The instances of what varies along some axes."""
        if axes not in self.by_axes:
            dims = [self.mesh.axis_position(axis) for axis in self.mesh.names if axis in axes]
            places = {rank: tuple(self.mesh.coordinate(rank)[dim] for dim in dims) for rank in self.ranks}
            first = {place: rank for rank, place in reversed(places.items())}
            ranks = tuple(sorted(first.values()))
            numbers = {rank: number for number, rank in enumerate(ranks)}
            made = Instances(ranks, {rank: numbers[first[place]] for rank, place in places.items()})
            self.by_axes[axes] = self.known.setdefault(tuple(made.positions.values()), made)
        return self.by_axes[axes]

    def instances(self, value: Value) -> Instances:
        """The instances of a value."""
        return self.along(self.varying[value])

    def regions(self) -> Sequence[Sequence[_Segment]]:
        """The segments between effects, and those of effects.

        Between effects, an operation has at least as many instances as its operands, so that what has fewer comes
        first.
        """
        found: list[list[_Segment]] = []
        operations = self.graph.operations
        parted = {o: segment for segment in self.parted() for o in segment.operations}
        for kind, group in itertools.groupby(operations, lambda o: parted.get(o) or _stands_alone(o)):
            if isinstance(kind, _Segment):
                found.append([kind])
                continue
            if kind:
                found.append([_Segment(self.along(operand_axes(o, self.varying)), (o,)) for o in group])
                continue
            by_instances: dict[Instances, list[Operation]] = {}
            for operation in group:
                by_instances.setdefault(self.instances(operation.tensors[0]), []).append(operation)
            segments = [_Segment(instances, tuple(held)) for instances, held in by_instances.items()]
            found.append(sorted(segments, key=lambda segment: len(segment.instances.ranks)))
        return found

    def parted(self) -> Iterator[_Segment]:
        """The branches and loops in which ranks may part, with what is inside of them."""
        regions, inside = self.graph.regions, tuple[Operation, ...]()
        for operation in self.graph.operations if regions else ():
            if operation.op not in (BRANCH, WHILE) or operation in inside:
                continue
            tests = (operation,) if operation.op is BRANCH else regions.members(operation, PROCEED)
            if all(self.instances(test.operands[0]).is_single for test in tests):
                continue
            whole = regions.whole(operation)
            if any(each.effect not in (None, Effect.REGION) for each in whole):
                continue  # of all ranks: the instances are equal
            inside = whole
            axes = frozenset[str]().union(*(operand_axes(each, self.varying) for each in inside))
            yield _Segment(self.along(axes), inside)

    def generated(self) -> Generated:
        """The program."""
        name = lambda value: f"[{self.name(value)}]" if self.instances(value).is_single else self.name(value)  # noqa: E731
        self.lines += ["def program(inputs, numbers=()):", f"    [{', '.join(map(name, self.graph.inputs))}] = inputs"]
        self.lines.append("    inputs.clear()")
        self.writer.compute_numbers(self.graph)
        self.free(unused_inputs(self.graph))
        for segment in self.segments:
            if segment.operations[0].op in STRUCTURE and len(segment.operations) > 1:
                self.one_by_one(segment)
            elif segment.operations[0].op in STRUCTURE:
                self.code.write(segment.operations[0], self.dying[segment.operations[0]])
            elif segment.operations[0].effect is not None:
                self.effect(segment.operations[0], segment.instances)
            elif segment.instances.is_single:
                self.straight(segment)
            else:
                self.loop(segment)
        self.writer.within((), "    ")
        aliases = aliases_of(self.graph)
        outputs = "".join(f"{self.output(value, clone=value in aliases)}, " for value in self.graph.outputs)
        positions = self.writer.reference([self.instances(value).positions for value in self.graph.outputs])
        self.lines.append(f"    yield None, ({outputs}), {positions}")
        return self.writer.compiled()

    def name(self, value: Value) -> str:
        """The variable outside of loops: of the instance, or of the list of instances."""
        return f"{self.writer.variable(value)}{'' if self.instances(value).is_single else 's'}"

    def item(self, value: Value, instances: Instances) -> str:
        """The instance of a value in a loop over instances."""
        held = self.instances(value)
        if held.is_single:
            return self.name(value)
        index = "index" if held is instances else f"{self.writer.reference(held.positions)}[rank]"
        return f"{self.name(value)}[{index}]"

    def each(self, value: Value) -> int | None:
        """The number of instances of a value; None if its variable is no list."""
        return None if self.instances(value).is_single else len(self.instances(value).ranks)

    def given(self, value: Value, like: Value) -> str:
        """The instances of a value, for those of another, which varies along all of its axes.

        A list is a new one: what reads a value last, takes its instances out of its list.
        """
        held, wanted = self.instances(value), self.instances(like)
        own = self.writer.argument(value) if held.is_single else self.name(value)
        if held is wanted:
            return own if held.is_single else f"[*{own}]"
        if held.is_single:
            return f"[{own}] * {len(wanted.ranks)}"
        places = self.writer.reference([held.positions[rank] for rank in wanted.ranks])
        return f"[{own}[place] for place in {places}]"

    def free(self, values: Sequence[Value]) -> None:
        """Delete all instances of values."""
        self.writer.delete(self.writer.indent, map(self.name, values))

    def output(self, value: Value, *, clone: bool) -> str:
        """The list of the instances of an output."""
        copy = ".clone()" if clone else ""
        if self.instances(value).is_single:
            return f"[{self.writer.argument(value)}{copy}]"
        return f"[v{copy} for v in {self.name(value)}]" if clone else self.name(value)

    def effect(self, operation: Operation, instances: Instances) -> None:
        """An operation with an effect: the calls of all its instances."""
        variable = lambda value: self.item(value, instances)  # noqa: E731
        argument = lambda leaf: self.writer.argument(leaf, variable)  # noqa: E731
        arguments = "".join(f"{argument(leaf)}, " for leaf in operation.args)
        options = ", ".join(f"{key!r}: {argument(leaf)}" for key, leaf in operation.kwargs.items())
        loop = "" if instances.is_single else f" for index, rank in enumerate({self.writer.reference(instances.ranks)})"
        op, positions = operation.op, self.writer.reference(instances.positions)
        if self.takes_turns:
            self.writer.within((), self.writer.indent)
            op = InRanges(op, tuple(opened.name for opened in self.writer.ranges_of(operation)))
        else:
            self.writer.within_ranges_of(operation, self.writer.indent)
        self.writer.locate(operation)
        call = f"{self.writer.reference(op)}, [(({arguments}), {{{options}}}){loop}], {positions}"
        self.lines.append(f"{self.writer.indent}results = yield {call}")
        for number, value in enumerate(operation.results):
            if value is None:
                continue
            item, held = f"[{number}]" if operation.returns_tuple else "", self.instances(value)
            if held.is_single:
                self.lines.append(f"{self.writer.indent}{self.name(value)} = results[{held.ranks[0]}]{item}")
            else:
                ranks = self.writer.reference(held.ranks)
                self.lines.append(f"{self.writer.indent}{self.name(value)} = [results[rank]{item} for rank in {ranks}]")
        self.lines.append(f"{self.writer.indent}results.clear()")
        self.free(self.dying[operation])

    def straight(self, segment: _Segment) -> None:
        """Operations with a single instance."""
        for operation in segment.operations:
            self.writer.write(
                operation, self.writer.indent, self.call(operation, segment.instances, self.dying[operation])
            )
            self.free(self.dying[operation])

    def loop(self, segment: _Segment) -> None:
        """Operations for one instance after the other."""
        made = dict.fromkeys(value for operation in segment.operations for value in operation.tensors)
        dying = dict.fromkeys(value for operation in segment.operations for value in self.dying[operation])
        listed = {value: None for value in made if value not in dying}
        self.lines += [f"{self.writer.indent}{self.name(value)} = []" for value in listed]
        around = common(operation.source.ranges for operation in segment.operations if operation.source)
        self.writer.within(around, self.writer.indent)
        self.lines.append(
            f"{self.writer.indent}for index, rank in enumerate({self.writer.reference(segment.instances.ranks)}):"
        )
        operands = [value for operation in segment.operations for value in operation.operands]
        outside = {value for value in operands if self.instances(value).is_single}
        last, loaded = last_uses_of(segment.operations, outside), {*made, *outside}
        indent = f"{self.writer.indent}    "
        for operation in segment.operations:
            for value in operation.operands:
                if value not in loaded:
                    loaded.add(value)
                    self.load(value, segment.instances, dies=value in dying)
            own = [value for value in last[operation] if self.instances(value) is segment.instances and value in dying]
            self.writer.write(operation, indent, self.call(operation, segment.instances, own))
            for value in operation.tensors:
                if value in listed:
                    self.lines.append(f"{indent}{self.name(value)}.append({self.writer.variable(value)})")
            self.writer.delete(indent, map(self.writer.variable, last[operation]))
        self.writer.within(around, indent)
        self.free([value for value in dying if value not in made])

    def one_by_one(self, segment: _Segment) -> None:
        """A branch or a loop for one instance after the other."""
        writer, variable = self.writer, self.writer.variable
        made = {value for operation in segment.operations for value in operation.tensors}
        inside = set(segment.operations)
        left = [v for v in made if v in self.graph.outputs or not inside.issuperset(self.graph.consumers.get(v, ()))]
        read = dict.fromkeys(v for o in segment.operations for v in o.operands if v not in made)
        loaded = [value for value in read if not self.instances(value).is_single]
        for value in left:
            self.lines.append(f"{writer.indent}{self.name(value)} = []")
        writer.within((), writer.indent)
        self.lines.append(f"{writer.indent}for index, rank in enumerate({writer.reference(segment.instances.ranks)}):")
        writer.indent += "    "
        for value in loaded:
            self.lines.append(f"{writer.indent}{variable(value)} = {self.item(value, segment.instances)}")
        free = lambda values: writer.delete(writer.indent, [variable(v) for v in values if v in made and v not in left])  # noqa: E731
        code = RegionCode(writer, self.graph, variable, lambda value, _: writer.argument(value), lambda _: None, free)
        for operation in segment.operations:
            dying = [value for value in self.dying[operation] if value in made and value not in left]
            if operation.op in STRUCTURE:
                code.write(operation, dying)
            else:
                writer.write(operation, writer.indent, self.call(operation, segment.instances, dying))
                free(dying)
        for value in left:
            self.lines.append(f"{writer.indent}if rank in {writer.reference(self.instances(value).ranks)}:")
            self.lines.append(f"{writer.indent}    {self.name(value)}.append({variable(value)})")
        writer.delete(writer.indent, map(variable, [*left, *loaded]))
        writer.within((), writer.indent)
        writer.indent = writer.indent[:-4]
        self.free([v for o in segment.operations for v in self.dying[o] if v not in made])

    def load(self, value: Value, instances: Instances, *, dies: bool) -> None:
        """Read an instance from its list, and take it out if no other iteration reads it and no later operation."""
        item, variable = self.item(value, instances), self.writer.variable(value)
        if dies and self.instances(value) is instances:
            self.lines.append(f"{self.writer.indent}    {variable}, {item} = {item}, None")
        else:
            self.lines.append(f"{self.writer.indent}    {variable} = {item}")

    def call(self, operation: Operation, instances: Instances, dying: Sequence[Value]) -> str:
        """The expression that calls an operator; what depends on the rank is bound for each instance."""
        if operation.op not in LOCALS:
            return self.writer.call(operation, dying)
        bound = [_bind(operation, self.mesh, rank) for rank in instances.ranks]
        function = self.writer.reference(bound[0] if instances.is_single else bound)
        operands = ", ".join(map(self.writer.argument, operation.operands))
        return f"{function}{'' if instances.is_single else '[index]'}({operands})"


def _stands_alone(operation: Operation) -> bool:
    return operation.effect is not None or operation.op in STRUCTURE


def _bind(operation: Operation, mesh: Mesh, rank: int) -> Local:
    """A primitive that does not communicate, as a function of its operand, if it has one."""
    rest = operation.op._schema.arguments[len(operation.args) :]
    args = (*operation.args, *(operation.kwargs[argument.name] for argument in rest))
    return bind_local(operation.op, mesh, rank, *(leaf.meta if isinstance(leaf, Value) else leaf for leaf in args))
