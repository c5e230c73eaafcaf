"""The document of a plan: human-readable plain data, written as JSON with equal bytes for equal plans.

A document has all decisions of the planner and the request that they answer: the mesh, the specs of arguments and
results, and the program, line by line. `spmd.inspect.saving.restore` rebuilds the plan from it without a search;
reports need only the document.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from spmd.core.documents import parse
from spmd.core.placement import Placement
from spmd.core.spec import DTensorSpec
from spmd.errors import PlanError
from spmd.inspect.layers.layers import RepeatedLayers, find_layers
from spmd.inspect.saving.images import find_origins
from spmd.inspect.saving.schema import Document, find_wrong
from spmd.ir.comm import Comm
from spmd.ir.graph import Graph, Operation, Value, map_leaves
from spmd.ir.markers import MARKERS
from spmd.plan.cost.account import account
from spmd.plan.cost.suspicious_moves import SuspiciousMove, suspicious_moves
from spmd.plan.data.plan import PlanData
from spmd.plan.machine.machine import Machine
from spmd.plan.memory.peak import memory_of
from spmd.plan.schedule.timing import timing_of
from spmd.rules.strategy import Strategy

FORMAT = 10
"""The version of the format; files of other versions are refused."""


def make_document(plan: PlanData) -> Document:
    """A plan as plain data, which `json` can write."""
    request, names, found = plan.request, unique_names(plan.graph), account(plan)
    moves = {(move.operation, move.comm): move for move in suspicious_moves(plan, found)}
    numbers = {operation: number for number, operation in enumerate(plan.graph.operations)}
    origins: dict[Operation, int | None] = {**find_origins(plan)}
    at = {operation.source: number for number, operation in reversed(list(enumerate(request.graph.operations)))}
    others = [operation for operation in plan.graph.operations if operation not in origins]
    origins |= {o: at.get(o.source) if o.source and o.op in MARKERS else None for o in others}
    lines = program_lines(request.graph)
    return {
        "format": FORMAT,
        "mesh": dict(plan.mesh.axes),
        "machine": _machine(request.machine),
        "seconds": plan.seconds,
        "timing": attrs.asdict(timing_of(plan)),
        "gap": plan.gap if math.isfinite(plan.gap) else None,
        "memory": {
            "peak": memory_of(plan).peak,
            **{kind.value: size for kind, size in memory_of(plan).by_kind.items() if size},
        },
        "peak_at": memory_of(plan).place,
        "program_hash": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        "inputs": {value.name: str(s) for value, s in zip(request.graph.inputs, request.input_specs, strict=True)},
        "keep_sharded": {
            request.graph.inputs[number].name: sorted(axes) for number, axes in sorted(request.keep_sharded.items())
        },
        "reduce_dtype": None if request.reduce_dtype is None else str(request.reduce_dtype),
        "outputs": [str(spec) for spec in request.output_specs],
        "program": lines,
        "arguments": [names[value] for value in plan.graph.inputs],
        "constants": [names[value] for value, _ in plan.graph.constants],
        "results": [names[value] for value in plan.graph.outputs],
        "values": {name: _value(plan, value) for value, name in names.items()},
        "operations": [
            {**_operation(plan, o, names, origins[o], found.seconds[o]), "held": held}
            for o, held in zip(plan.graph.operations, _held(plan), strict=True)
        ],
        "comms": [_comm(c, numbers[o], moves.get((o, c))) for o, comms in found.comms.items() for c in comms],
        "layers": [_layers(layers) for layers in find_layers(plan, found)],
        "fallbacks": [numbers[operation] for operation in plan.fallbacks],
    }


def _held(plan: PlanData) -> list[int]:
    """The bytes that a rank holds during each operation; of one that runs nothing, as before it."""
    memory, found = memory_of(plan), []
    known, now = memory.by_operation, memory.timeline[0]
    for operation in plan.graph.operations:
        now = known.get(operation, now)
        found.append(now)
    return found


def save(plan: PlanData, path: str | os.PathLike[str]) -> None:
    """Write a plan as JSON, with one line for each value and each operation."""
    Path(path).write_text(as_json(make_document(plan)), encoding="utf-8")


def as_json(document: Document) -> str:
    """The JSON text of a document: deterministic, with one line for every item of its top-level lists and mappings."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_block(item)}" for key, item in document.items()) + "\n}\n"


def _block(item: Any) -> str:
    if isinstance(item, dict) and item:
        rows = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in item.items()]
        return "{\n " + ",\n ".join(rows) + "\n}"
    if isinstance(item, list) and item:
        return "[\n " + ",\n ".join(map(json.dumps, item)) + "\n]"
    return json.dumps(item)


def read(path: str | os.PathLike[str]) -> Document:
    """Read a document from a file, and check it against the schema.

    Raises:
        PlanError: the file cannot be read, is not a plan, or has another format version.
    """
    try:
        document = parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"The plan {os.fspath(path)} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise PlanError(f"{os.fspath(path)} is not a saved plan: {error}. Write one with plan.save(path).") from None
    version = document.get("format") if isinstance(document, dict) else None
    if type(version) is not int or version != FORMAT:
        raise PlanError(
            f"{os.fspath(path)} has format {version!r:.80}, expected {FORMAT}. Plan again, and save the new plan."
        )
    wrong = find_wrong(document)
    if wrong is not None:
        raise PlanError(f"The saved plan {os.fspath(path)} is damaged: {wrong}. Plan again, and save the new plan.")
    saved_machine(document)  # constants that no machine has
    return document  # type: ignore[no-any-return]


def program_lines(graph: Graph) -> list[str]:
    """A program as text, one line for each input, constant, operation and output, without devices and source lines."""
    return [
        *(f"input {value!r}" for value in graph.inputs),
        *(f"constant {value!r}" for value, _ in graph.constants),
        *(repr(_without_devices(operation)) for operation in graph.operations),
        *(f"output {value!r}" for value in graph.outputs),
    ]


def _without_devices(operation: Operation) -> Operation:
    hide = lambda leaf: "a device" if isinstance(leaf, torch.device) else leaf  # noqa: E731
    return attrs.evolve(
        operation, args=map_leaves(hide, operation.args), kwargs=map_leaves(hide, dict(operation.kwargs))
    )


def unique_names(graph: Graph) -> dict[Value, str]:
    """A unique name for every value of a graph, in order of definition: its own, with a number if taken (`mm:2`)."""
    seen: Counter[str] = Counter()
    names = {}
    for value in defined_values(graph):
        seen[value.name] += 1
        names[value] = value.name if seen[value.name] == 1 else f"{value.name}:{seen[value.name]}"
    return names


def defined_values(graph: Graph) -> Iterable[Value]:
    """All values of a graph in order of definition."""
    yield from graph.inputs
    yield from (value for value, _ in graph.constants)
    for operation in graph.operations:
        yield from operation.tensors


def _machine(machine: Machine) -> Document:
    names = ("axis_bandwidth", "axis_latency", "dtype_flops")
    return attrs.asdict(machine) | {name: dict(getattr(machine, name)) for name in names}


def saved_machine(document: Document) -> Machine:
    """The machine that a plan was made for, from its document.

    Raises:
        PlanError: the document is damaged.
    """
    try:
        return Machine(**document["machine"])
    except PlanError as error:
        raise PlanError(f"The saved plan is damaged: {error} Plan again, and save the new plan.") from None


def _value(plan: PlanData, value: Value) -> Document:
    spec = plan.specs[value]
    return {
        "meta": str(value.meta),
        "spec": str(plan.layout(value)),
        "atoms": [list(atoms) for atoms in plan.logical[value]],
        **encode_spec(spec),
    }


def encode_spec(spec: DTensorSpec) -> Document:
    """A spec as plain data: the mesh axes that shard each dim, and the reductions by partial axis."""
    return {"dims": [list(axes) for axes in spec.dims], "partial": dict(spec.partial)}


def _operation(
    plan: PlanData, operation: Operation, names: Mapping[Value, str], origin: int | None, seconds: float
) -> Document:
    strategies = plan.strategies.get(operation, {})
    return {
        "results": [names[value] for value in operation.tensors],
        "operator": str(operation.op),
        "operands": [names[value] for value in operation.operands],
        "at": str(operation.source or ""),
        "code": operation.source.code if operation.source else "",
        "seconds": seconds,
        "group": operation.group,
        "of": origin,
        "strategies": {axis: encode_strategy(strategy) for axis, strategy in strategies.items()},
    }


def encode_strategy(strategy: Strategy) -> Document:
    """A strategy as plain data: its label and placements.

    Its local implementation is not saved: `restore` takes that of the rule's equal strategy.
    """
    texts = lambda states: [_placement(state) for state in states]  # noqa: E731
    return {"label": strategy.label, "operands": texts(strategy.operands), "results": texts(strategy.results)}


def _placement(state: Placement) -> str:
    return repr(state)


def _comm(comm: Comm, operation: int, move: SuspiciousMove | None) -> Document:
    return {
        "kind": comm.kind,
        "axes": list(comm.axes),
        "bytes": comm.bytes,
        "seconds": comm.seconds,
        "cause": comm.cause,
        "at": str(comm.source or ""),
        "operation": operation,
        "suspicious": None if move is None else {"needed": move.needed, "advice": move.advice},
    }


def _layers(layers: RepeatedLayers) -> Document:
    return {
        "at": layers.place,
        "count": layers.count,
        "operations": len(layers.copies[0]),
        "alike": [attrs.asdict(alike) for alike in layers.alike],
    }
