"""Along which mesh axes the values of a program vary: ranks that differ only in other axes hold equal tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from spmd.collectives.host import HOST_PRINT
from spmd.collectives.local import LOCALS
from spmd.collectives.primitives import COLLECTIVES, PCAST
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec
from spmd.ir.effects import Effect
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.random_operators import TEMPLATED
from spmd.ir.regions import CARRY, NEXT, PROCEED

Axes: TypeAlias = frozenset[str]


def varying_axes(graphs: Sequence[Graph], mesh: Mesh, specs: Sequence[DTensorSpec]) -> Mapping[Value, Axes]:
    """The mesh axes along which each value may vary.

    Args:
        graphs: the programs of all ranks, each once.
        mesh: the mesh.
        specs: the specs of their inputs.
    """
    carried: dict[Value, Axes] = {}
    while True:
        found = _varying(graphs, mesh, specs, carried)
        left = _carried(graphs, found)
        if left == carried:
            return found
        carried = left


def _carried(graphs: Sequence[Graph], found: Mapping[Value, Axes]) -> dict[Value, Axes]:
    """The axes along which the carries of loops vary after a trip."""
    left: dict[Value, Axes] = {}
    for graph in graphs:
        trips = {o.operands[1]: found[o.operands[0]] for o in graph.operations if o.op is PROCEED}  # by predicates
        turns = {o.tensors[0]: o.operands[1] for o in graph.operations if o.op is CARRY}
        nexts = [o.operands for o in graph.operations if o.op is NEXT]
        left |= {carry: found[new] | found[carry] | trips.get(turns[carry], frozenset()) for new, carry in nexts}
    return left


def _varying(
    graphs: Sequence[Graph], mesh: Mesh, specs: Sequence[DTensorSpec], carried: Mapping[Value, Axes]
) -> dict[Value, Axes]:
    """As `varying_axes`, for carries that vary along known axes."""
    found: dict[Value, Axes] = dict(carried)
    for graph in graphs:
        found.update((value, frozenset()) for value, _ in graph.constants)
        found.update((value, _axes_of(spec)) for value, spec in zip(graph.inputs, specs, strict=True))
    waiting = [_up_to_effects(graph, found) for graph in graphs]
    for operations in itertools.zip_longest(*waiting):  # what a rank gets depends on the operands of all ranks
        together = [operation for operation in operations if operation is not None]
        operands = frozenset[str]().union(*(operand_axes(operation, found) for operation in together))
        for operation in together:
            found.update(dict.fromkeys(operation.tensors, _effect_axes(operation, operands, frozenset(mesh.names))))
    return found


def _axes_of(spec: DTensorSpec) -> Axes:
    return frozenset([*itertools.chain(*spec.dims), *(axis for axis, _ in spec.partial)])


def _up_to_effects(graph: Graph, found: dict[Value, Axes]) -> Iterator[Operation]:
    """The operations with effects; the axes of all other results are put in `found`."""
    for operation in graph.operations:
        if operation.effect not in (None, Effect.REGION):
            yield operation
            continue
        axes = operand_axes(operation, found)
        if operation.op is CARRY:
            axes |= found.get(operation.tensors[0], frozenset())
        found.update(dict.fromkeys(operation.tensors, axes))


def operand_axes(operation: Operation, found: Mapping[Value, Axes]) -> Axes:
    """The axes along which a call varies, of which `found` has the operands."""
    axes = frozenset[str]().union(*(found[operand] for operand in operation.operands))
    return axes | _named(operation) if operation.op in LOCALS and operation.op is not PCAST.op else axes


def _effect_axes(operation: Operation, operands: Axes, every: Axes) -> Axes:
    """The axes along which the results of an operation with an effect vary."""
    if operation.op in COLLECTIVES:
        named = _named(operation)
        return operands - named if COLLECTIVES[operation.op].is_invariant else operands | named
    if operation.effect is Effect.RANDOM:
        return frozenset() if operation.op in TEMPLATED else operands
    return frozenset() if operation.op is HOST_PRINT else every


def _named(operation: Operation) -> Axes:
    """The axes that a primitive names."""
    return frozenset(operation.kwargs["axes"] if "axes" in operation.kwargs else operation.args[-1])
