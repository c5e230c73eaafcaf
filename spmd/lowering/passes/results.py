"""The passes that copy what a program or a trip leaves if it is views of parts of larger tensors: these are freed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import attrs
import torch

from spmd.collectives.local import LOCALS
from spmd.core.mesh import Mesh
from spmd.core.own_storage import own_memory
from spmd.ir.graph import Annotations, Graph, Operation, Value
from spmd.ir.names import Namer
from spmd.ir.operator_kinds import is_composite
from spmd.ir.regions import BEGINS, STACK
from spmd.lowering.passes.aliases import Aliases


def copy_partial_views(graph: Graph, place: tuple[Mesh, int], donated: Collection[int]) -> Graph:
    """Copy results that would hold more memory than their own, after the last operation that reads that memory.

    Args:
        graph: a rank's program.
        place: the mesh and the number of the rank.
        donated: the positions of the donated inputs.
    """
    if not _may_have_views(graph, graph.outputs):
        return graph
    aliases = Aliases(graph, place)
    held_until = graph.regions.held_until
    read = [(o, aliases.bases[value]) for o in graph.operations for value in o.operands]
    last = {base: held_until(o, base) for o, base in read}
    after: dict[Operation, list[Operation]] = defaultdict(list)
    namer, copies = Namer(graph.names), dict[Value, Value]()
    for base, values in _partial_views(graph, aliases, donated).items():
        made = {value: Value(namer.fresh(f"{value.name}_copy"), value.meta) for value in values}
        name = namer.fresh("copies") if len(made) > 1 else ""
        notes = Annotations(tuple_name=name, origin=last[base].annotations.origin)
        copy = Operation(own_memory, values, {}, tuple(made.values()), last[base].source, annotations=notes)
        after[last[base]].append(copy)
        copies |= made
    operations = tuple(each for operation in graph.operations for each in _placed(operation, after[operation]))
    specs = {**graph.specs, **{copies[value]: spec for value, spec in graph.specs.items() if value in copies}}
    outputs = tuple(copies.get(value, value) for value in graph.outputs)
    return attrs.evolve(graph, operations=operations, outputs=outputs, specs=specs)


def copy_partial_items(graph: Graph, place: tuple[Mesh, int]) -> Graph:
    """Copy items of stacks that would hold more memory than their own until the end of a loop.

    Each copy stands after the last operation of the trip that reads that memory.

    Args:
        graph: a rank's program.
        place: the mesh and the number of the rank.
    """
    stacks = [operation for operation in graph.operations if operation.op is STACK]
    if not _may_have_views(graph, [stack.operands[0] for stack in stacks]):
        return graph
    aliases, regions, namer = Aliases(graph, place), graph.regions, Namer(graph.names)
    items: dict[tuple[Operation, Value], dict[Value, Value]] = defaultdict(dict)
    for stack in stacks:
        y, loop = stack.operands[0], regions.path(stack)[0]
        base = aliases.bases[y]
        if base is not y and regions.home(base) is loop:
            items[loop, base].setdefault(y, Value(namer.fresh(f"{y.name}_copy"), y.meta))
    copies: dict[tuple[Operation, Value], Value] = {}
    around: dict[Operation, list[Operation]] = defaultdict(list)
    for (loop, base), made in items.items():
        if sum(value.meta.nbytes for value in made) >= base.meta.nbytes:
            continue
        reads = [(o, v) for o in graph.operations if o.op is not STACK for v in o.operands if aliases.bases[v] is base]
        last = max((regions.held_until(*read) for read in reads), key=graph.operations.index)
        if regions.around(last) is not loop:
            last = next(stack for stack in stacks if stack.operands[0] in made)
        notes = Annotations(tuple_name=namer.fresh("copies") if len(made) > 1 else "", origin=last.annotations.origin)
        copy = Operation(own_memory, tuple(made), {}, tuple(made.values()), last.source, annotations=notes)
        around[last].append(copy)
        copies |= {(loop, value): new for value, new in made.items()}
    operations: list[Operation] = []
    for operation in graph.operations:
        copied = copies.get((regions.path(operation)[0], operation.operands[0])) if operation.op is STACK else None
        left = operation if copied is None else operation.substitute({operation.operands[0]: copied})
        operations += _placed(left, around[operation])
    specs = {new: graph.specs[value] for (_, value), new in copies.items() if value in graph.specs}
    return attrs.evolve(graph, operations=tuple(operations), specs={**graph.specs, **specs})


def _placed(operation: Operation, copies: Sequence[Operation]) -> tuple[Operation, ...]:
    """An operation with the copies of what it reads last: behind it, but around a region that it begins or leaves."""
    return (*copies, operation) if operation.op in (*BEGINS, STACK) else (operation, *copies)


def _partial_views(graph: Graph, aliases: Aliases, donated: Collection[int]) -> dict[Value, tuple[Value, ...]]:
    """The results that together are smaller than what they are views of, by that.

    A view that the function takes of an argument stays one, if the caller holds the argument.
    """
    kept = {value for position, value in enumerate(graph.inputs) if position not in donated}
    views: dict[Value, list[Value]] = defaultdict(list)
    for value in dict.fromkeys(graph.outputs):
        if aliases.bases[value] not in kept or value in aliases.slices:
            views[aliases.bases[value]].append(value)
    return {
        base: tuple(values)
        for base, values in views.items()
        if sum(value.meta.nbytes for value in values) < base.meta.nbytes
    }


def _may_have_views(graph: Graph, values: Iterable[Value]) -> bool:
    """Test for a value that may be a view of a tensor with more bytes."""
    makers = graph.producers
    for value in values:
        nbytes = value.meta.nbytes
        while (maker := makers.get(value)) is not None and maker.operands and _may_return_view(maker):
            value = maker.operands[0]
            if value.meta.nbytes > nbytes:
                return True
    return False


def _may_return_view(operation: Operation) -> bool:
    op = operation.op
    return not isinstance(op, torch._ops.OpOverload) or operation.is_view or is_composite(op) or op in LOCALS
