"""Per-rank values as global ones, so that one program can return them and another take them.

A value of which each rank of a region holds its own is packed to a global value with one more dim, sharded over the
region's mesh axes: each rank holds the part that is its value. Nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch

from spmd.collectives.manual import ENTER, LEAVE, ManualAxes
from spmd.core.mesh import Mesh
from spmd.core.spec import P, TensorMeta
from spmd.core.spec_text import encode_spec
from spmd.ir.graph import Graph, Operation, Value

_VIEW = torch.ops.aten.view.default


@attrs.frozen(eq=False)
class Packing:
    """How one per-rank value is packed.

    Args:
        value: the per-rank value.
        packed: the global value.
        pack, unpack: the operations from one to the other, and back.
    """

    value: Value
    packed: Value
    pack: tuple[Operation, ...]
    unpack: tuple[Operation, ...]

    @classmethod
    def of(cls, value: Value, mesh: Mesh, manual: frozenset[str]) -> Packing:
        """The packing of a value with these manual axes."""
        axes = [axis for axis in mesh.names if axis in manual]
        sizes = [mesh.axis_size(axis) for axis in axes]
        held = TensorMeta((1, *value.meta.shape), value.meta.dtype)
        whole = TensorMeta((math.prod(sizes), *value.meta.shape), value.meta.dtype)
        row, packed, again = Value(value.name, held), Value(value.name, whole), Value(value.name, held)
        end: tuple[Any, ...] = encode_spec(P(tuple(axes))), [], axes, sizes
        return cls(
            value,
            packed,
            (
                Operation(_VIEW, (value, list(held.shape)), {}, (row,)),
                Operation(LEAVE, (row, *end, list(whole.shape)), {}, (packed,)),
            ),
            (
                Operation(ENTER, (packed, *end, list(held.shape)), {}, (again,)),
                Operation(_VIEW, (again, list(value.meta.shape)), {}, (value,)),
            ),
        )

    def renamed(self, value: Value) -> Packing:
        """The packing of another program's value that is the same."""
        *rest, last = self.unpack
        return attrs.evolve(self, value=value, unpack=(*rest, attrs.evolve(last, results=(value,))))


def packings(graph: Graph, values: Iterable[Value], mesh: Mesh) -> dict[Value, Packing]:
    """The packings of those of some values of a program that are per-rank."""
    manual = ManualAxes.of(graph)
    return {value: Packing.of(value, mesh, manual[value]) for value in values if value in manual}


def with_packed_outputs(graph: Graph, known: Mapping[Value, Packing]) -> Graph:
    """The program that returns global values in place of per-rank ones."""
    used = [known[value] for value in dict.fromkeys(graph.outputs) if value in known]
    outputs = tuple(known[value].packed if value in known else value for value in graph.outputs)
    added = tuple(operation for packing in used for operation in packing.pack)
    return attrs.evolve(graph, operations=graph.operations + added, outputs=outputs).verify()


def with_packed_inputs(graph: Graph, known: Mapping[Value, Packing]) -> Graph:
    """The program that takes global values in place of per-rank ones."""
    used = [known[value] for value in graph.inputs if value in known]
    inputs = tuple(known[value].packed if value in known else value for value in graph.inputs)
    added = tuple(operation for packing in used for operation in packing.unpack)
    return attrs.evolve(graph, inputs=inputs, operations=added + graph.operations).verify()
