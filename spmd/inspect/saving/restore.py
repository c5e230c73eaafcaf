"""Rebuilds a plan from a saved document without a search; refuses documents that were made for another request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from spmd.collectives.manual import ENTER, LEAVE, manual_axes
from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.core.spec import DTensorSpec
from spmd.errors import PlanError, SpmdError
from spmd.inspect.saving.computes import Origins, Restored, check_computes
from spmd.inspect.saving.document import Document, defined_values, encode_strategy, program_lines
from spmd.inspect.saving.images import Images, restacked
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import MARKERS
from spmd.ir.regions import ITEM, STACK
from spmd.ir.source import Source
from spmd.plan.data.draft import logical_meta
from spmd.plan.data.layout import Layout
from spmd.plan.data.request import Request
from spmd.plan.search.prepare import Prepared, options_of, prepare
from spmd.rules.strategy import MANUAL, LogicalShape, Strategy

_MARKERS = {str(op): op for op in MARKERS}


def restore(document: Document, request: Request) -> Restored:
    """Restore the plan in a document, for a request with the same program, mesh axes and specs.

    Raises:
        PlanError: the document was made for another mesh, program or specs, or with rules that have other strategies;
            or it is damaged, or its plan does not compute the program.
    """
    check_same(document, request)
    prepared = prepare(request)
    try:
        restored, origins = _Restorer(document, prepared).run()
    except SpmdError as error:
        raise error if isinstance(error, PlanError) else damaged(str(error)) from error
    check_computes(restored, origins, prepared)
    return restored


def check_same(document: Document, request: Request) -> None:
    """Check that a document was made for a request.

    Raises:
        PlanError: it was made for another mesh, program, specs or `reduce_dtype`, or without some of the request's
            `keep_sharded`; the message has the first difference.
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
    names = [value.name for value in request.graph.inputs]
    if list(document["inputs"]) != names or len(document["outputs"]) != len(request.output_specs):
        found = f"{list(document['inputs'])!r:.200} and {len(document['outputs'])} results"
        raise _refusal(
            f"the inputs are {names!r:.200} and there are {len(request.output_specs)} results here, {found} in the plan"
        )
    for what, saved, spec in (
        *((f"input {name}", document["inputs"][name], s) for name, s in zip(names, request.input_specs, strict=True)),
        *((f"result {n}", *pair) for n, pair in enumerate(zip(document["outputs"], request.output_specs, strict=True))),
    ):
        if saved != str(spec):
            raise _refusal(f"{what} is {spec} here and {saved} in the plan")
    for number, axes in request.keep_sharded.items():
        name = request.graph.inputs[number].name
        kept = document["keep_sharded"].get(name, [])
        if not axes <= set(kept):
            raise _refusal(f"keep_sharded has {name} along {sorted(axes)} here and {kept} in the plan")
    if document["reduce_dtype"] != (request.reduce_dtype and str(request.reduce_dtype)):
        raise _refusal(f"reduce_dtype is {request.reduce_dtype} here and {document['reduce_dtype']} in the plan")


def _refusal(difference: str) -> PlanError:
    return PlanError(f"The saved plan is for something else: {difference}\n  Plan again, and save the new plan.")


def _place(graph: Graph, line: int) -> str:
    position = line - len(graph.inputs) - len(graph.constants)
    if not 0 <= position < len(graph.operations) or graph.operations[position].source is None:
        return ""
    return f", at {graph.operations[position].source}"


class _Restorer:
    """Rebuilds the graph of the plan, operation by operation."""

    def __init__(self, document: Document, prepared: Prepared) -> None:
        self.document, self.prepared, self.request = document, prepared, prepared.request
        self.images = Images(self.request.graph, self.request.mesh)
        self.manual = manual_axes(self.request.graph, self.request.mesh)
        self.own = {value.name: value for value in defined_values(self.request.graph)}
        self.last = {_stem(name): name for name in document["values"]}
        self.values: dict[str, Value] = {}
        self.found: dict[Value, frozenset[Value]] = {}
        self.logical: dict[Value, LogicalShape] = {}
        self.specs: dict[Value, DTensorSpec] = {}
        self.strategies: dict[Operation, Mapping[str, Strategy]] = {}

    def run(self) -> tuple[Restored, Origins]:
        document, graph = self.document, self.request.graph
        own = [value for value, _ in graph.constants]
        inputs = self.define_all(document["arguments"], graph.inputs, "arguments")
        constants = self.define_all(document["constants"], own, "constants")
        pairs = [self.operation(number, entry) for number, entry in enumerate(document["operations"])]
        operations = tuple(operation for operation, _ in pairs)
        outputs = tuple(self.value(name, "the results") for name in document["results"])
        unknown = document["values"].keys() - self.values.keys()
        if unknown:
            raise damaged(f"no operation defines the value {min(unknown)!r}")
        tensors = (tensor for _, tensor in graph.constants)
        restored = Restored(
            Graph(inputs, tuple(zip(constants, tensors, strict=True)), operations, outputs).verify(),
            MappingProxyType(self.logical),
            MappingProxyType(self.specs),
            MappingProxyType(self.strategies),
            tuple(operations[number] for number in document["fallbacks"]),
            math.inf if document["gap"] is None else document["gap"],
        )
        return restored, Origins(self.found, dict(pairs))

    def define_all(self, names: Sequence[str], own: Sequence[Value], what: str) -> tuple[Value, ...]:
        if list(map(_stem, names)) != [value.name for value in own]:
            raise damaged(f"its {what} are {names!r:.200}, and those of the program {[v.name for v in own]!r:.200}")
        return tuple(self.define(name, frozenset([value])) for name, value in zip(names, own, strict=True))

    def value(self, name: str, where: str) -> Value:
        if name not in self.values:
            raise damaged(f"{where} take the value {name!r:.80}, which is not defined before")
        return self.values[name]

    def define(self, name: str, own: frozenset[Value]) -> Value:
        """Define the value that a document calls `name`, an image of the values `own` of the program."""
        entry = self.document["values"].get(name)
        if entry is None or name in self.values:
            raise damaged(f"the value {name!r:.80} is {'not described' if entry is None else 'defined twice'}")
        if not _stem(name).isidentifier():
            raise damaged(f"{name!r:.80} is not the name of a value")
        meta = next(iter(own)).meta
        atoms, dims = tuple(map(tuple, entry["atoms"])), tuple(map(tuple, entry["dims"]))
        if tuple(map(math.prod, atoms)) != meta.shape or not all(atoms):
            raise damaged(f"the value {name!r:.80} {meta} has atoms {entry['atoms']!r:.200}")
        spec = DTensorSpec(self.request.mesh, dims, entry["partial"], logical_meta(meta, atoms))
        layout = Layout(spec, atoms, self.manual.get(next(iter(own)), ()))
        described = f"{entry['meta']} {entry['spec']}"
        if described != f"{meta} {layout}":
            raise damaged(f"the value {name!r:.80} is described as {described!r:.300} and is {meta} {layout}")
        images = self.images.of(own, layout)
        same = self.own.get(_stem(name))
        value = same if same in images and self.last[_stem(name)] == name else Value(_stem(name), meta)
        self.values[name], self.found[value] = value, images
        self.logical[value], self.specs[value] = atoms, spec
        return value

    def operation(self, number: int, entry: Document) -> tuple[Operation, Operation | None]:
        """An operation of the plan, and the operation of the program that it executes (None for a marker)."""
        program, where = self.request.graph.operations, f"operation {number}, {entry['operator']!r:.80},"
        operands = [self.value(name, where) for name in entry["operands"]]
        origin = entry["of"]
        if origin is not None and origin >= len(program):
            raise damaged(f"{where} is of operation {origin} of the program, which has {len(program)}")
        if entry["operator"] in _MARKERS:
            source = None if origin is None else program[origin].source
            return self.marker(where, entry, operands, source), None
        if origin is None and entry["operator"] == str(STACK):
            return self.restack(where, entry, operands), None
        if origin is None or str(program[origin].op) != entry["operator"]:
            of = "none" if origin is None else str(program[origin].op)
            raise damaged(f"{where} is of operation {origin} of the program, which is {of}")
        own = program[origin]
        if (len(operands), len(entry["results"])) != (len(own.operands), len(own.tensors)):
            raise damaged(
                f"{where} has {len(operands)} operands and {len(entry['results'])} results, expected "
                f"{len(own.operands)} and {len(own.tensors)}"
            )
        if entry["group"] not in (None, own.group):
            raise damaged(f"{where} is of group {entry['group']}, expected {own.group}")
        taken, names = iter(operands), iter(entry["results"])
        results = tuple(None if like is None else self.define(next(names), frozenset([like])) for like in own.results)
        operation = attrs.evolve(own.with_operands(lambda _: next(taken)), results=results, group=entry["group"])
        chosen = {axis: self.strategy(own, saved) for axis, saved in entry["strategies"].items()}
        if chosen:
            self.strategies[operation] = MappingProxyType(chosen)
        return operation, own

    def marker(self, where: str, entry: Document, operands: Sequence[Value], source: Source | None) -> Operation:
        if (len(operands), len(entry["results"])) != (1, 1) or entry["strategies"] or entry["group"] is not None:
            raise damaged(f"{where} must have one operand and one result, and neither strategies nor a group")
        result = self.define(entry["results"][0], self.found[operands[0]])
        return Operation(_MARKERS[entry["operator"]], tuple(operands), {}, (result,), source)

    def restack(self, where: str, entry: Document, operands: Sequence[Value]) -> Operation:
        """The operation of a loop that stacks the items which it has read."""
        own = frozenset[Value]()
        if (len(operands), len(entry["results"])) == (2, 1) and entry["group"] is None:
            own = restacked(self.request.graph, *map(self.found.__getitem__, operands))
        if not own:
            raise damaged(f"{where} stacks what no loop of the program reads")
        result = self.define(entry["results"][0], own)
        reads = next(o for o in self.request.graph.operations if o.op is ITEM and o.operands[0] in own)
        operation = Operation(STACK, (*operands, result.meta.shape[0]), {}, (result,), reads.source)
        options = options_of(operation, self.logical, self.request.rules)
        self.strategies[operation] = MappingProxyType(
            {axis: _matching(operation, options, saved) for axis, saved in entry["strategies"].items()}
        )
        return operation

    def strategy(self, template: Operation, saved: Mapping[str, Any]) -> Strategy:
        """The strategy of an operation that matches a saved one."""
        return _matching(template, self.prepared.options.get(template, ()), saved)


def _matching(template: Operation, options: Sequence[Strategy], saved: Mapping[str, Any]) -> Strategy:
    """The one of an operation's strategies that matches a saved one."""
    for strategy in _strategies(template, options):
        if encode_strategy(strategy) == saved:
            return strategy
    raise PlanError(
        f"The saved plan runs {template.op} at {template.source} with strategy {saved['label']!r}, "
        f"{saved['operands']} -> {saved['results']}, which its rule does not give any more. Plan again."
    )


def _strategies(operation: Operation, options: Sequence[Strategy]) -> Iterator[Strategy]:
    """The strategies of an operation; running replicated is always one.

    Values enter and leave manual regions with any placement here: `check_computes` checks that it is the program's.
    """
    yield from options
    if operation.op in (ENTER, LEAVE):
        inside: Placement = Replicate()
        for outside in (*map(Shard, range(64)), Partial("sum"), Partial("max"), inside):
            operand, result = (outside, inside) if operation.op is ENTER else (inside, outside)
            yield Strategy((operand,), (result,), label="given")
    for label in ("replicate", MANUAL):
        yield Strategy((Replicate(),) * len(operation.operands), (Replicate(),) * len(operation.tensors), label=label)


def _stem(name: str) -> str:
    """The name of a value without the number that makes it unique."""
    return name.partition(":")[0]


def damaged(reason: str) -> PlanError:
    """The error for a document that `make_document` cannot have made."""
    return PlanError(f"The saved plan is damaged: {reason}. Plan again, and save the new plan.")
