"""How a plan shards the layers of a program: repeated parts, and which of their copies are sharded identically."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import attrs

from spmd.core.quantity import size_text, time_text
from spmd.inspect.layers.shares import Share, find_shares
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import MARKERS
from spmd.plan.cost.account import Account
from spmd.plan.data.layout import Layout
from spmd.plan.data.plan import PlanData
from spmd.plan.search.repeats import Copy, Repeat, find_repeats, numbered
from spmd.rules.strategy import LogicalShape


@attrs.frozen
class LayerGroup:
    """Layers that are sharded identically: same layouts of values, strategies of operators and collectives.

    Args:
        layers: their numbers.
        compute, communication: predicted seconds of one of them.
        bytes: sent per rank in one of them.
        otherwise: the first difference from the largest group of layers, in words; "" for the largest group.
    """

    layers: tuple[int, ...]
    compute: float
    communication: float
    bytes: float
    otherwise: str

    @property
    def numbers(self) -> str:
        """Their numbers as a text: `0, 2-11`."""
        runs = itertools.groupby(enumerate(self.layers), lambda pair: pair[1] - pair[0])
        spans = [[number for _, number in run] for _, run in runs]
        return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)

    def __str__(self) -> str:
        many = len(self.layers) > 1
        lines = [f"layer{'s' * many} {self.numbers}", "alike" * many, self.otherwise]
        figures = f"{time_text(self.compute + self.communication)}, {size_text(self.bytes)} sent{' each' * many}"
        return ", ".join(filter(None, lines)) + f": {figures}"


@attrs.frozen(eq=False)
class RepeatedLayers:
    """One repeated part of a program; its `str` says how its layers are sharded.

    Args:
        copies: the operations of each layer, in order of execution.
        numbers: the number of each layer; backward layers have those of the forward layers whose values they consume.
        place: the lines that they come from.
        alike: the groups of layers that are sharded identically, the largest first.
    """

    copies: tuple[Copy, ...]
    numbers: tuple[int, ...]
    place: str
    alike: tuple[LayerGroup, ...]

    @property
    def count(self) -> int:
        """How many layers there are."""
        return len(self.copies)

    def __str__(self) -> str:
        head = f"{self.count} layers of {len(self.copies[0])} operations at {self.place}"
        return "\n".join([head, *(f"  {alike}" for alike in self.alike)])

    def __repr__(self) -> str:
        return f"<{self}>"


def find_layers(plan: PlanData, account: Account) -> tuple[RepeatedLayers, ...]:
    """The layers of a plan: the repeated parts of its program, and how the copies of each are sharded.

    Args:
        plan: the plan.
        account: its predicted times and collectives.
    """
    repeats = find_repeats(plan.request.graph)
    shares = find_shares(plan, repeats)
    describe = _Describer(plan, account)
    found = []
    for index, (repeat, layers) in enumerate(zip(repeats, numbered(repeats), strict=True)):
        numbers = tuple(number for _, number in layers)
        parts = {number: shares[index, copy] for copy, number in enumerate(numbers)}
        found.append(RepeatedLayers(repeat.copies, numbers, _place(repeat), tuple(describe.alike(parts))))
    return tuple(found)


def _place(repeat: Repeat) -> str:
    """The lines of all copies, by file, and whether their operators belong to a backward pass."""
    sources = {operation.source for copy in repeat.copies for operation in copy if operation.source is not None}
    lines: dict[str, set[int]] = defaultdict(set)
    for source in sources:
        lines[os.path.basename(source.file)].add(source.line)
    spans = [(file, min(found), max(found)) for file, found in sorted(lines.items())]
    backward = {source.backward for source in sources}
    kind = " (forward and backward)" if len(backward) > 1 else " (backward)" if True in backward else ""
    return ", ".join(f"{file}:{first}" + (f"-{last}" if last > first else "") for file, first, last in spans) + kind


@attrs.frozen
class _Fact:
    """One fact about the sharding of a copy: a value, a verb, and what is said of the value."""

    value: str
    verb: str
    said: str

    def __str__(self) -> str:
        return f"{self.value} {self.verb} {self.said}"


_Facts: TypeAlias = Mapping[tuple[int, str], _Fact]
"""The sharding of a copy: facts by position in the copy and question, such as `result 0` or `strategy`."""


class _Describer:
    """Describes how the copies are sharded, and how two of them differ."""

    def __init__(self, plan: PlanData, account: Account) -> None:
        self.plan, self.account = plan, account
        self.program = plan.request.graph.producers
        self.texts: dict[tuple[int, LogicalShape], str] = {}

    def alike(self, shares: Mapping[int, Share]) -> Iterator[LayerGroup]:
        """Group layers, given by number, that are sharded identically; the largest group first."""
        facts = {number: self.facts(share) for number, share in sorted(shares.items())}
        groups: dict[tuple[tuple[tuple[int, str], str], ...], list[int]] = defaultdict(list)
        for number, found in facts.items():
            groups[tuple((question, fact.said) for question, fact in found.items())].append(number)
        ordered = sorted(groups.values(), key=lambda numbers: -len(numbers))
        for numbers in ordered:
            operations = [operation for _, operation in shares[numbers[0]]]
            comms = [comm for operation in operations for comm in self.account.comms.get(operation, ())]
            yield LayerGroup(
                tuple(numbers),
                sum(self.account.seconds[operation] for operation in operations),
                sum(comm.seconds for comm in comms),
                sum(comm.bytes for comm in comms),
                "" if numbers is ordered[0] else _difference(facts[numbers[0]], facts[ordered[0][0]]),
            )

    def facts(self, share: Share) -> _Facts:
        """The sharding of one copy, in order of its positions."""
        names = {position: f"%{o.tensors[0].name}" for position, o in share if o.tensors[0] in self.program}
        facts = {
            (position, question): fact
            for position, operation in share
            for question, fact in self.of_operation(names[position], operation)
        }
        sent = Counter(
            (position, f"{comm.kind} over {', '.join(comm.axes)} ({comm.bytes:,.0f} bytes)")
            for position, operation in share
            for comm in self.account.comms.get(operation, ())
        )
        for (position, comm), count in sent.items():
            facts[position, comm] = _Fact(names[position], "needs", f"{count} x " * (count > 1) + comm)
        return {question: facts[question] for question in sorted(facts)}

    def of_operation(self, name: str, operation: Operation) -> Iterator[tuple[str, _Fact]]:
        """The facts about one operation except its collectives, each with its question."""
        origin = self.program.get(operation.tensors[0])
        if origin is None:
            if operation.op not in MARKERS:
                yield f"again {operation.name}", _Fact(name, "needs", f"second {operation.name}")
            return
        for number, (value, given) in enumerate(zip(operation.operands, origin.operands, strict=True)):
            yield f"operand {number}", _Fact(name, f"takes %{given.name} as", self.layout(value))
        for number, value in enumerate(operation.tensors):
            yield f"result {number}", _Fact(f"%{value.name}", "is", self.layout(value))
        strategies = self.plan.strategies.get(operation, {})
        labels = ", ".join(f"{strategy.label} over {axis}" for axis, strategy in strategies.items())
        yield "strategy", _Fact(name, "is computed by", labels)

    def layout(self, value: Value) -> str:
        spec, atoms = self.plan.specs[value], self.plan.logical[value]
        key = id(spec), atoms  # hashing a spec would take most of the time
        if key not in self.texts:
            self.texts[key] = str(Layout(spec, atoms))
        return self.texts[key]


def _difference(facts: _Facts, usual: _Facts) -> str:
    """The first difference of a copy from a usual one, in words, and how many more there are."""
    first, *others = _differences(facts, usual)
    return first + (f" (and {len(others)} more)" if others else "")


def _differences(facts: _Facts, usual: _Facts) -> Iterator[str]:
    for question in sorted({*facts, *usual}):
        if question not in facts:
            yield f"without the {usual[question].said} of {usual[question].value}"
        elif question not in usual:
            yield f"{facts[question]}"
        elif facts[question].said != usual[question].said:
            yield f"{facts[question]} in place of {usual[question].said}"
