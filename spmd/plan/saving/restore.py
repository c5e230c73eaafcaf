"""From a saved document to a plan of the same program, without a search; refused if it was made for something else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from spmd.errors import PlanError
from spmd.graph import Graph, Operation, Value, map_leaves
from spmd.placement import Replicate
from spmd.plan.markers import REDISTRIBUTE, RELABEL
from spmd.plan.request import Request
from spmd.plan.saving.document import Document, encode_strategy, program_lines
from spmd.plan.search.draft import logical_meta
from spmd.plan.search.prepare import prepare
from spmd.rules.strategy import LogicalShape, Strategy
from spmd.spec import DTensorSpec

_MARKERS = {str(op): op for op in (REDISTRIBUTE, RELABEL)}


@attrs.frozen(eq=False)
class Restored:
    """The parts of a plan that a document holds; the names are those of `Plan`."""

    graph: Graph
    logical: Mapping[Value, LogicalShape]
    specs: Mapping[Value, DTensorSpec]
    strategies: Mapping[Operation, Mapping[str, Strategy]]
    fallbacks: tuple[Operation, ...]
    gap: float


def restore(document: Document, request: Request) -> Restored:
    """The parts of the plan in a document, for a request that asks for the same.

    Raises:
        PlanError: the document was made for another mesh, program or specs, or with rules that gave other strategies;
            or it is damaged.
    """
    try:
        check_same(document, request)
        return _Restorer(document, request).run()
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise PlanError(f"The saved plan is damaged ({type(error).__name__}: {error}). Plan again.") from error


def check_same(document: Document, request: Request) -> None:
    """Check that a document answers a request.

    Raises:
        PlanError: it was made for another mesh, program or specs, or may gather what is to be kept sharded; says where
            they differ first.
    """
    if list(document["mesh"].items()) != list(request.mesh.axes.items()):
        raise _refusal(f"the mesh has axes {dict(request.mesh.axes)} here and {document['mesh']} in the plan")
    lines = program_lines(request.graph)
    for number, (here, saved) in enumerate(zip(lines, document["program"], strict=False)):
        if here != saved:
            raise _refusal(
                f"line {number} of the program is the first that differs{_place(request.graph, number)}:\n"
                f"    here         {here}\n    in the plan  {saved}"
            )
    if len(lines) != len(document["program"]):
        raise _refusal(f"the program has {len(lines)} lines here and {len(document['program'])} in the plan")
    inputs = zip(document["inputs"].items(), request.input_specs, strict=True)
    for what, saved, spec in (
        *((f"input {name}", saved, spec) for (name, saved), spec in inputs),
        *((f"result {n}", *pair) for n, pair in enumerate(zip(document["outputs"], request.output_specs, strict=True))),
    ):
        if saved != str(spec):
            raise _refusal(f"{what} is {spec} here and {saved} in the plan")
    for number, axes in request.keep_sharded.items():
        name = request.graph.inputs[number].name
        kept = document["keep_sharded"].get(name, [])
        if not axes <= set(kept):
            raise _refusal(f"keep_sharded has {name} along {sorted(axes)} here and {kept} in the plan")


def _refusal(difference: str) -> PlanError:
    return PlanError(f"The saved plan is for something else: {difference}\n  Plan again, and save the new plan.")


def _place(graph: Graph, line: int) -> str:
    position = line - len(graph.inputs) - len(graph.constants)
    if not 0 <= position < len(graph.operations) or graph.operations[position].source is None:
        return ""
    return f", at {graph.operations[position].source}"


class _Restorer:
    """Writes the plan's program again, operation by operation."""

    def __init__(self, document: Document, request: Request) -> None:
        self.document, self.request = document, request
        self.options = prepare(request).options
        self.known = _known_values(document, request.graph)
        self.values: dict[str, Value] = {}
        self.logical: dict[Value, LogicalShape] = {}
        self.specs: dict[Value, DTensorSpec] = {}
        self.strategies: dict[Operation, Mapping[str, Strategy]] = {}

    def run(self) -> Restored:
        document, graph = self.document, self.request.graph
        inputs = tuple(self.define(n, v) for n, v in zip(document["arguments"], graph.inputs, strict=True))
        constants = tuple(
            (self.define(name, value), tensor)
            for name, (value, tensor) in zip(document["constants"], graph.constants, strict=True)
        )
        operations = tuple(map(self.operation, document["operations"]))
        outputs = tuple(self.values[name] for name in document["results"])
        return Restored(
            Graph(inputs, constants, operations, outputs).verify(),
            MappingProxyType(self.logical),
            MappingProxyType(self.specs),
            MappingProxyType(self.strategies),
            tuple(operations[number] for number in document["fallbacks"]),
            math.inf if document["gap"] is None else document["gap"],
        )

    def define(self, name: str, like: Value) -> Value:
        """The value that a document calls `name`, with the meta of `like`."""
        entry = self.document["values"][name]
        value = self.known.get(name) or Value(name.partition(":")[0], like.meta)
        atoms = tuple(map(tuple, entry["atoms"]))
        dims = tuple(map(tuple, entry["dims"]))
        self.values[name], self.logical[value] = value, atoms
        self.specs[value] = DTensorSpec(self.request.mesh, dims, entry["partial"], logical_meta(value.meta, atoms))
        return value

    def operation(self, entry: Document) -> Operation:
        operands = [self.values[name] for name in entry["operands"]]
        if entry["operator"] in _MARKERS:
            (operand,), (name,) = operands, entry["results"]
            source = None if entry["of"] is None else self.request.graph.operations[entry["of"]].source
            return Operation(_MARKERS[entry["operator"]], (operand,), {}, (self.define(name, operand),), source)
        template = self.request.graph.operations[entry["of"]]
        taken, names = iter(operands), iter(entry["results"])
        args, kwargs = map_leaves(
            lambda leaf: next(taken) if isinstance(leaf, Value) else leaf, (template.args, dict(template.kwargs))
        )
        results = tuple(None if like is None else self.define(next(names), like) for like in template.results)
        operation = attrs.evolve(template, args=args, kwargs=kwargs, results=results, group=entry["group"])
        chosen = {axis: self.strategy(template, saved) for axis, saved in entry["strategies"].items()}
        if chosen:
            self.strategies[operation] = MappingProxyType(chosen)
        return operation

    def strategy(self, template: Operation, saved: Mapping[str, Any]) -> Strategy:
        """The strategy of an operation that a document describes."""
        for strategy in _strategies(template, self.options.get(template, ())):
            if encode_strategy(strategy) == saved:
                return strategy
        raise PlanError(
            f"The saved plan runs {template.op} at {template.source} with strategy {saved['label']!r}, "
            f"{saved['operands']} -> {saved['results']}, which its rule does not give any more. Plan again."
        )


def _strategies(operation: Operation, options: Sequence[Strategy]) -> Iterator[Strategy]:
    """What an operation may do; to run replicated is always possible."""
    yield from options
    yield Strategy((Replicate(),) * len(operation.operands), (Replicate(),) * len(operation.tensors))


def _known_values(document: Document, graph: Graph) -> dict[str, Value]:
    """The values that a plan shares with its program: of several with one name, the last, which has its atoms."""
    last = {name.partition(":")[0]: name for name in document["values"]}
    values = (*graph.inputs, *(v for v, _ in graph.constants), *(v for o in graph.operations for v in o.tensors))
    return {last[value.name]: value for value in values if value.name in last}
