"""Manual regions: the parts of a program in which a value is what one rank holds along some mesh axes.

`enter(x, spec)` is this rank's shard of a global value, `leave(x, spec)` the global value of which each rank holds the
shard x; each is the other's transpose. The axes that a region is manual over are arguments, `axes`; the region is all
that is computed from what enters, up to where it leaves. Along other axes, values are global as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.collectives.primitive import Primitive, Shape, register_primitive
from spmd.collectives.primitives import COLLECTIVES, PRIMITIVES
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec, P
from spmd.core.spec_text import encode_spec, parse_spec
from spmd.ir.graph import Graph, Operation, Value


def _transposed(spec: str, reduced: Sequence[str]) -> tuple[str, list[str]]:
    """The spec of the cotangent: that of an unreduced value is reduced, that of a reduced value unreduced."""
    parsed = parse_spec(spec)
    partial = P(*parsed.dims, partial=dict.fromkeys(reduced, "sum"))
    return encode_spec(partial), [axis for axis, _ in parsed.partial]


def _batched(n: int, spec: str, reduced: Any, axes: Any, sizes: Any, shape: Any) -> tuple[Any, ...]:
    parsed = parse_spec(spec)
    moved = encode_spec(P(None, *parsed.dims, partial=dict(parsed.partial)))
    return moved, reduced, axes, sizes, [n, *shape]


def _other_way(name: str) -> Any:
    def transpose(g: Tensor, shape: Shape, spec: str, reduced: Any, axes: Any, sizes: Any, _: Any) -> Tensor:
        op = getattr(torch.ops.spmd, name)
        return op(g, *_transposed(spec, reduced), axes, sizes, list(shape))  # type: ignore[no-any-return]

    return transpose


_ARGUMENTS = "(Tensor x, str spec, str[] reduced, str[] axes, int[] sizes, int[] shape) -> Tensor"

_ENTER = Primitive(
    f"enter{_ARGUMENTS}",
    lambda _, *args: tuple(args[-1]),
    _other_way("leave"),
    types=lambda *args: {},
    batched=_batched,
)
_LEAVE = Primitive(
    f"leave{_ARGUMENTS}",
    lambda _, *args: tuple(args[-1]),
    _other_way("enter"),
    types=lambda *args: {},
    batched=_batched,
)

for _primitive in (_ENTER, _LEAVE):
    register_primitive(_primitive)

ENTER: torch._ops.OpOverload = torch.ops.spmd.enter.default
"""`enter(x, spec, reduced, axes, sizes, shape)`: the rank's shard, of a `shape`, of a global value.

`spec` is the spec of the global value along the mesh axes `axes` of the region, whose sizes are `sizes`; along the axes
`reduced` the shard is typed as reduced, along the partial axes of `spec` as unreduced."""

LEAVE: torch._ops.OpOverload = torch.ops.spmd.leave.default
"""`leave(x, spec, reduced, axes, sizes, shape)`: the global value, of a `shape`, of which each rank holds a shard."""

_NAMING_AXES = frozenset(
    {
        torch.ops.spmd.axis_index.default,
        torch.ops.spmd.shard_offset.default,
        *(primitive.op for primitive in PRIMITIVES),
    }
)
"""The operators that per-rank code calls by the names of axes: their results are per-rank, also those of constants."""


def region_axes(operation: Operation) -> tuple[str, ...]:
    """The mesh axes of an `enter` or a `leave`."""
    return tuple(operation.args[3])


def global_spec(operation: Operation, mesh: Mesh) -> DTensorSpec:
    """The spec of the global value of an `enter` or a `leave`, along the axes of the region."""
    value = operation.operands[0] if operation.op is ENTER else operation.tensors[0]
    return DTensorSpec.make(mesh, parse_spec(operation.args[1]), value.meta)


def drop_trivial_axes(graph: Graph, mesh: Mesh) -> Graph:
    """The program with no collective over mesh axes of one rank, along which nothing is sent."""
    replaced: dict[Value, Value] = {}
    operations = []
    for operation in graph.operations:
        operation = operation.substitute(replaced)
        if operation.op in COLLECTIVES:
            axes = [axis for axis in operation.args[-1] if mesh.axis_size(axis) > 1]
            is_identity = COLLECTIVES[operation.op].is_identity(*operation.args[1:-1])
            if not axes and is_identity and operation.operands[0].meta == operation.tensors[0].meta:
                replaced[operation.tensors[0]] = operation.operands[0]
                continue
            if axes:
                operation = attrs.evolve(operation, args=(*operation.args[:-1], axes))
        operations.append(operation)
    outputs = tuple(replaced.get(value, value) for value in graph.outputs)
    variants = graph.variants and graph.variants.map(lambda other: drop_trivial_axes(other, mesh))
    return attrs.evolve(graph, operations=tuple(operations), outputs=outputs, variants=variants)


class ManualAxes:
    """The manual mesh axes of values, along which a value is what one rank holds; found operation by operation."""

    def __init__(self) -> None:
        self._axes: dict[Value, frozenset[str]] = {}

    @classmethod
    def of(cls, graph: Graph) -> Mapping[Value, frozenset[str]]:
        """The manual axes of all values of a program that have any."""
        found = cls()
        for operation in graph.operations:
            found.add(operation)
        return found._axes

    def of_value(self, value: Value) -> frozenset[str]:
        """The manual axes of a value whose producer was added."""
        return self._axes.get(value, frozenset())

    def declare(self, value: Value, axes: Iterable[str]) -> None:
        """Say which manual axes a value has that no operation produces."""
        self._axes[value] = frozenset(axes)

    def add(self, operation: Operation) -> frozenset[str]:
        """The manual axes of an operation, whose producers were added before: those along which ranks run it as is.

        Along the axes of an `enter` or a `leave` it goes from one kind of value to the other.
        """
        axes: frozenset[str] = frozenset()
        if self._axes:
            axes = axes.union(*(self._axes.get(value, frozenset()) for value in operation.operands))
        if operation.op in _NAMING_AXES:
            axes |= set(operation.args[-1])
        held = axes
        if operation.op is ENTER:
            axes |= set(region_axes(operation))
            held = axes
        elif operation.op is LEAVE:
            held = axes - set(region_axes(operation))
        if held:
            self._axes.update(dict.fromkeys(operation.tensors, held))
        return axes


def manual_axes(graph: Graph, mesh: Mesh) -> Mapping[Value, tuple[str, ...]]:
    """The manual axes, in mesh order, of all values of a program that have any."""
    found = ManualAxes.of(graph)
    return {value: tuple(axis for axis in mesh.names if axis in axes) for value, axes in found.items()}
