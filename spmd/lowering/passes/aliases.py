"""The memory of the values in a rank's program: which of them are views, and of what.

The runtimes are eager, so every result that is not a view has memory of its own. Whether an operator returns a view is
found by running it on meta tensors with the strides of the rank's tensors: a reshape copies where strides require it.
"""

from __future__ import annotations

import attrs
import torch

from spmd.collectives.local import LOCALS
from spmd.core.mesh import Mesh
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.in_place import InPlace
from spmd.ir.regions import CARRY
from spmd.lowering.passes.layouts import COPIES
from spmd.lowering.passes.shards import SHARD
from spmd.plan.local.strided import Result, Strided, StridedCall, results_of


class Aliases:
    """The memory of each value of a rank's program.

    Args:
        graph: the program.
        place: the mesh and the number of the rank.
    """

    def __init__(self, graph: Graph, place: tuple[Mesh, int]) -> None:
        given = (*graph.inputs, *(value for value, _ in graph.constants))
        self.bases = dict(zip(given, given, strict=True))
        """The value that each value's memory was allocated for."""
        self.layouts = {value: Strided.contiguous(value.meta) for value in given}
        """The strides of each value."""
        self.slices = set[Value]()
        """The values that reshards have sliced, and views of them."""
        self._place = place
        for operation in graph.operations:
            self._add(operation)

    def _add(self, operation: Operation) -> None:
        operands = operation.operands
        for value, result in zip(operation.tensors, self._results(operation), strict=True):
            self.layouts[value] = result.layout
            viewed = None if result.view_of is None else operands[result.view_of]
            self.bases[value] = value if viewed is None else self.bases[viewed]
            if operation.op is SHARD or viewed in self.slices:
                self.slices.add(value)

    def _results(self, operation: Operation) -> tuple[Result, ...]:
        if operation.op is CARRY:  # of its first trip only it is what the loop begins with
            return (Result(Strided.contiguous(operation.tensors[0].meta)),)
        if isinstance(operation.op, InPlace):
            operation = attrs.evolve(operation, op=operation.op.op)
        if isinstance(operation.op, torch._ops.OpOverload):
            return results_of(operation, self.layouts, self._place if operation.op in LOCALS else None)
        for needed, copy in COPIES.items():
            if operation.op is copy and needed.is_met(self.layouts[operation.operands[0]].tensor()):
                return (Result(self.layouts[operation.operands[0]], 0),)
        return tuple(Result(Strided.contiguous(value.meta)) for value in operation.tensors)

    def call(self, operation: Operation) -> StridedCall:
        """The call of an operation on the tensors of the rank."""
        return StridedCall.of(operation, [self.layouts[value] for value in operation.operands])

    def is_whole(self, value: Value) -> bool:
        """Test for a value that is all of its memory, in row-major order, so that an operator may write to it."""
        return self.layouts[value].is_contiguous and self.bases[value].meta.nbytes == value.meta.nbytes
