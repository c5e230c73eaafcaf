"""The pass that inserts copies for kernels that need operands in a certain memory layout."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from spmd.ir.graph import Annotations, Graph, Operation, Value
from spmd.ir.names import Namer
from spmd.rules.layouts import Need, lay_out


def insert_layout_copies(graph: Graph) -> Graph:
    """Insert `contiguous` or `rows` before operators whose kernels need an operand in that memory layout.

    Local strides depend on the plan and on the shards that the caller passes, so whether to copy is decided at run
    time: a tensor that already has the layout is returned as it is.
    """
    namer = Namer(graph.names)
    specs = dict(graph.specs)
    made: dict[tuple[Value, Need, Operation | None], Value] = {}
    regions = graph.regions
    operations: list[Operation] = []
    for operation in graph.operations:

        def copy(leaf: Any, needed: Need, before: Operation = operation) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            block = regions.around(before)
            if (leaf, needed, block) not in made:
                result = Value(namer.fresh(f"{leaf.name}_{needed.name.lower()}"), leaf.meta)
                specs.update({result: specs[leaf]} if leaf in specs else {})
                notes = Annotations(origin=before.annotations.origin)
                operations.append(Operation(COPIES[needed], (leaf,), {}, (result,), before.source, annotations=notes))
                made[leaf, needed, block] = result
            return made[leaf, needed, block]

        if isinstance(operation.op, torch._ops.OpOverload):
            args, kwargs = lay_out(operation.op, operation.args, operation.kwargs, copy)
            if args is not operation.args or kwargs is not operation.kwargs:
                operation = attrs.evolve(operation, args=args, kwargs=kwargs)
        operations.append(operation)
    return attrs.evolve(graph, operations=tuple(operations), specs=specs) if made else graph


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """The tensor if it is contiguous and starts at storage offset 0, else a copy that is."""
    return Need.CONTIGUOUS.lay_out(x)


def rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor if its last dim has stride 1, else a contiguous copy."""
    return Need.ROWS.lay_out(x)


COPIES = {Need.CONTIGUOUS: contiguous, Need.ROWS: rows}
