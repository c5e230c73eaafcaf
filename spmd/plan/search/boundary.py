"""Inputs, outputs and constraints: from the physical specs that users give to the logical specs of the planner.

A physical spec shards a physical dim into contiguous chunks. If the dim has several atoms, these chunks are shards of
the leading atoms only as far as the mesh axes divide them. Also, the planner nests mesh axes that share a dim in
planning order, and a physical spec may nest them in another one. Axes that cannot be carried over to the logical spec
are gathered by an explicit redistribution, which is priced as any other.

The planner chooses the spec of an output without a given one (`FREE`), among those that a physical spec expresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from spmd.collectives.manual import ENTER, LEAVE, global_spec
from spmd.core.mesh import Mesh
from spmd.core.spec import Dims, DTensorSpec, TensorMeta
from spmd.core.spec_text import parse_spec
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import FREE, PIN, REDISTRIBUTE, RELABEL
from spmd.ir.source import Source
from spmd.plan.data.assignment import flat_shape
from spmd.plan.data.draft import logical_meta, physical_shape
from spmd.rules.strategy import LogicalShape

Specs = tuple[DTensorSpec, DTensorSpec]

CONSTRAINTS = (torch.ops.spmd.constrain.default, torch.ops.spmd.reshard.default)
"""The operators of the public API that only constrain the spec of a value."""


@attrs.frozen(eq=False)
class WithEdges:
    """A program in which the specs of inputs, outputs and constraints are explicit.

    Args:
        graph: the program, with markers at inputs, outputs and constraints where they are needed.
        logical: the atoms of every dim of every value.
        pinned: the operand and result specs, over logical shapes, of the markers.
        given: the specs, over logical shapes, of inputs and constants.
        ends: as in `Draft`.
    """

    graph: Graph
    logical: Mapping[Value, LogicalShape]
    pinned: Mapping[Operation, Specs]
    given: Mapping[Value, DTensorSpec]
    ends: Mapping[Value, DTensorSpec]


def carry_over(spec: DTensorSpec, logical: LogicalShape, order: Sequence[str]) -> DTensorSpec:
    """The part of a physical spec that holds over the logical shape, as a spec of that shape.

    Of the axes that shard one dim, the longest prefix is carried over that follows the planning `order` and in which
    each axis divides the rest of the leading atom (if the dim has a single atom, it need not).
    """
    dims: list[tuple[str, ...]] = []
    for axes, atoms in zip(spec.dims, logical, strict=True):
        dims.extend(_carry_dim(spec.mesh, axes, atoms, order))
    return DTensorSpec(spec.mesh, tuple(dims), spec.partial, logical_meta(spec.meta, logical))


def _carry_dim(
    mesh: Mesh, axes: tuple[str, ...], atoms: tuple[int, ...], order: Sequence[str]
) -> list[tuple[str, ...]]:
    kept: list[tuple[str, ...]] = [()] * len(atoms)
    atom, left, last = 0, atoms[0], -1
    for axis in axes:
        if order.index(axis) < last:
            break
        while left == 1 and atom + 1 < len(atoms):
            atom, left = atom + 1, atoms[atom + 1]
        size = mesh.axis_size(axis)
        if len(atoms) > 1 and left % size:
            break
        kept[atom] = (*kept[atom], axis)
        left, last = -(-left // size), order.index(axis)
    return kept


def physical_dims(dims: Dims, logical: LogicalShape) -> Dims:
    """The mesh axes of every physical dim, from those of every logical dim."""
    found: list[tuple[str, ...]] = []
    position = 0
    for atoms in logical:
        found.append(tuple(axis for axes in dims[position : position + len(atoms)] for axis in axes))
        position += len(atoms)
    return tuple(found)


def expressed(spec: DTensorSpec, meta: TensorMeta, logical: LogicalShape, order: Sequence[str]) -> DTensorSpec | None:
    """The physical spec that a spec over the logical shape is, for a planning `order`; None if no `P` expresses it."""
    physical = DTensorSpec(spec.mesh, physical_dims(spec.dims, logical), spec.partial, meta)
    return physical if carry_over(physical, logical, order) == spec else None


class _EdgeWriter:
    """Builds the program of a `WithEdges`, operation by operation."""

    def __init__(self, mesh: Mesh, logical: Mapping[Value, LogicalShape], order: Sequence[str]) -> None:
        self.mesh = mesh
        self.order = order
        self.logical = dict(logical)
        self.operations: list[Operation] = []
        self.pinned: dict[Operation, Specs] = {}
        self.ends: dict[Value, DTensorSpec] = {}

    def emit(self, op: object, value: Value, result: Value, specs: Specs, source: Source | None = None) -> None:
        operation = Operation(op, (value,), {}, (result,), source)  # type: ignore[arg-type]
        self.operations.append(operation)
        self.pinned[operation] = specs

    def derived(self, value: Value, suffix: str, logical: LogicalShape) -> Value:
        result = Value(f"{value.name}_{suffix}", value.meta)
        self.logical[result] = logical
        return result

    def gathered(self, spec: DTensorSpec, logical: LogicalShape) -> tuple[DTensorSpec, DTensorSpec]:
        """The part of a physical spec that is carried over: as a physical spec, and as a logical one."""
        kept = carry_over(spec, logical, self.order)
        return attrs.evolve(spec, dims=physical_dims(kept.dims, logical)), kept

    def enter(self, value: Value, spec: DTensorSpec, result: Value, source: Source | None = None) -> DTensorSpec:
        """Emit operations from `value`, unrefined and with a physical spec, to `result`, refined; returns its spec."""
        physical, kept = self.gathered(spec, self.logical[result])
        if physical != spec:
            moved = self.derived(value, "gathered", physical_shape(value.meta))
            self.emit(REDISTRIBUTE, value, moved, (spec, physical), source)
            value = moved
        self.emit(RELABEL, value, result, (physical, kept), source)
        return kept

    def leave(self, value: Value, spec: DTensorSpec, source: Source | None = None) -> Value:
        """Emit operations from a refined value to an unrefined one with exactly a physical spec; returns the latter."""
        physical, kept = self.gathered(spec, self.logical[value])
        pinned = self.derived(value, "pinned", self.logical[value])
        self.emit(PIN, value, pinned, (kept, kept), source)
        plain = pinned
        if self.logical[value] != physical_shape(value.meta):
            plain = self.derived(value, "placed", physical_shape(value.meta))
            self.emit(RELABEL, pinned, plain, (kept, physical), source)
        if physical == spec:
            return plain
        moved = self.derived(value, "sharded", physical_shape(value.meta))
        self.emit(REDISTRIBUTE, plain, moved, (physical, spec), source)
        return moved

    def free(self, value: Value) -> Value:
        """Emit the operation that stands for an output without a given spec; returns the output."""
        result = self.derived(value, "free", self.logical[value])
        self.operations.append(Operation(FREE, (value,), {}, (result,)))
        return result

    def constrain(self, operation: Operation, spec: DTensorSpec) -> None:
        """Replace a constraint by operations whose result has exactly the constraint's spec."""
        (value,), (result,) = operation.operands, operation.tensors
        physical, kept = self.gathered(spec, self.logical[value])
        if physical == spec and self.logical[value] == self.logical[result]:
            self.emit(PIN, value, result, (kept, kept), operation.source)
        else:
            self.enter(self.leave(value, spec, operation.source), spec, result, operation.source)

    def end(self, operation: Operation, spec: DTensorSpec) -> None:
        """Emit an `enter` or a `leave`, whose global value has a spec along the axes of the manual region.

        Where the atoms of the global value do not express the spec, it is laid out by its physical dims, and replicated
        along all other axes.
        """
        (value,), (result,) = operation.operands, operation.tensors
        outside, inside = (value, result) if operation.op is ENTER else (result, value)
        physical, kept = self.gathered(spec, self.logical[outside])
        if physical == spec:
            self.operations.append(operation)
            self.ends[result] = kept
            return
        local = DTensorSpec.replicated(spec.mesh, logical_meta(inside.meta, self.logical[inside]))
        if operation.op is ENTER:
            plain = self.leave(value, spec, operation.source)
            placed = attrs.evolve(operation, args=(plain, *operation.args[1:]))
            self.pinned[placed] = spec, local
        else:
            plain = Value(f"{result.name}_whole", result.meta)
            self.logical[plain] = physical_shape(result.meta)
            placed = attrs.evolve(operation, results=(plain,))
            self.pinned[placed] = local, spec
        self.operations.append(placed)
        if operation.op is LEAVE:
            self.enter(plain, spec, result, operation.source)


def bound(
    graph: Graph,
    logical: Mapping[Value, LogicalShape],
    mesh: Mesh,
    input_specs: Sequence[DTensorSpec],
    output_specs: Sequence[DTensorSpec | None],
    order: Sequence[str],
) -> WithEdges:
    """Make the specs of inputs, outputs and constraints explicit, for one order of planning.

    Args:
        graph: the program.
        logical: the atoms of its values.
        mesh: the mesh.
        input_specs, output_specs: physical specs; None for an output whose spec the planner chooses.
        order: all mesh axes of more than one rank in planning order; the first is the major one.
    """
    writer = _EdgeWriter(mesh, logical, order)
    given: dict[Value, DTensorSpec] = {}
    inputs = []
    for value, spec in zip(graph.inputs, map(without_trivial_axes, input_specs), strict=True):
        if flat_shape(logical[value]) == value.meta.shape and writer.gathered(spec, logical[value])[0] == spec:
            inputs.append(value)
            given[value] = spec
            continue
        plain = Value(value.name, value.meta)
        writer.logical[plain] = physical_shape(value.meta)
        inputs.append(plain)
        given[plain] = spec
        writer.enter(plain, spec, value)
    for value, _ in graph.constants:
        given[value] = DTensorSpec.replicated(mesh, logical_meta(value.meta, logical[value]))
    for operation in graph.operations:
        own = _spec_of(operation, mesh)
        if own is None:
            writer.operations.append(operation)
        elif operation.op in CONSTRAINTS:
            writer.constrain(operation, own)
        else:
            writer.end(operation, own)
    outputs = tuple(
        writer.free(value) if spec is None else writer.leave(value, without_trivial_axes(spec))
        for value, spec in zip(graph.outputs, output_specs, strict=True)
    )
    bounded = attrs.evolve(graph, inputs=tuple(inputs), operations=tuple(writer.operations), outputs=outputs)
    return WithEdges(bounded.verify(), writer.logical, writer.pinned, given, writer.ends)


def _spec_of(operation: Operation, mesh: Mesh) -> DTensorSpec | None:
    """The spec that a constraint, an `enter` or a `leave` has for its global value; None for other operations."""
    if operation.op in CONSTRAINTS:
        spec = DTensorSpec.make(mesh, parse_spec(operation.args[1]), operation.tensors[0].meta)
    elif operation.op in (ENTER, LEAVE):
        spec = global_spec(operation, mesh)
    else:
        return None
    return without_trivial_axes(spec)


def axes_of_one_dim(
    graph: Graph, mesh: Mesh, input_specs: Sequence[DTensorSpec], output_specs: Sequence[DTensorSpec | None]
) -> frozenset[tuple[str, ...]]:
    """The mesh axes that shard one dim together, in the specs that `bound` is given: it depends on their order only."""
    specs = [*map(without_trivial_axes, input_specs), *(without_trivial_axes(spec) for spec in output_specs if spec)]
    specs += [spec for operation in graph.operations if (spec := _spec_of(operation, mesh)) is not None]
    return frozenset(axes for spec in specs for axes in spec.dims if len(axes) > 1)


def without_trivial_axes(spec: DTensorSpec) -> DTensorSpec:
    """The spec without mesh axes of one rank, which have no effect."""
    sizes = spec.mesh.axes
    dims = tuple(tuple(axis for axis in dim if sizes[axis] > 1) for dim in spec.dims)
    return attrs.evolve(spec, dims=dims, partial=tuple(item for item in spec.partial if sizes[item[0]] > 1))
