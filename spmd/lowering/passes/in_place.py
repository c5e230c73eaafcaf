"""The pass that lets operators write into the memory of donated inputs.

The program says where an operator may write: into an operand that comes from a donated input and that nothing in the
program reads later. Whether it does is decided when it runs, as the caller or another rank of a virtual mesh may hold
the tensor, or a tensor with the same memory (`spmd.runtime.in_place`). Then the result is a new tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.in_place import InPlace, rewritable, targets
from spmd.ir.list_operators import FUSED


def write_in_place(graph: Graph, donated: Iterable[int]) -> Graph:
    """Let operators write into the memory of donated inputs; fused optimizers are always called by their `InPlace`.

    Args:
        graph: a rank's program.
        donated: the positions of the donated inputs.
    """
    writable = {graph.inputs[position] for position in donated}
    if not writable and all(operation.op not in FUSED for operation in graph.operations):
        return graph
    kept, operations = frozenset(graph.outputs), []
    for operation in graph.operations:
        pairs = rewritable(operation)
        found = {a: b for a, b in pairs if a in writable and a not in kept and _is_last(graph, a, operation)}
        writable.update(found.values())
        if found or operation.op in FUSED:
            free = tuple(a in found for a in targets(operation))
            operation = attrs.evolve(operation, op=InPlace(operation.op, free))
        operations.append(operation)
    return attrs.evolve(graph, operations=tuple(operations))


def _is_last(graph: Graph, value: Value, operation: Operation) -> bool:
    """Whether an operation is the last one to read a value: not in a loop around it, which reads it every trip."""
    return graph.consumers[value][-1] is operation and graph.regions.reads_at(operation, value) is operation
