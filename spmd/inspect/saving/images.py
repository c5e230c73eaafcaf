"""Finds the values of the program that each value of its plan represents.

A plan redistributes, relabels and rematerializes values. All resulting values represent the same value of the program,
and are called its *images*. A constraint computes nothing, it only requires a layout: an image of its operand that has
this layout is also an image of its result.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec
from spmd.core.spec_text import parse_spec
from spmd.ir.graph import Graph, Operation, Value, freeze, map_leaves
from spmd.ir.markers import MARKERS
from spmd.ir.regions import ITEM
from spmd.plan.data.layout import Layout
from spmd.plan.data.plan import PlanData
from spmd.plan.search.boundary import CONSTRAINTS, carry_over, physical_dims, without_trivial_axes

"""The operators that planning inserts."""


class Images:
    """Finds the values of a program that a value of the plan is an image of."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self._constraints: dict[Value, list[tuple[Value, DTensorSpec]]] = {}
        for operation in graph.operations:
            if operation.op in CONSTRAINTS:
                (operand,), (result,) = operation.operands, operation.tensors
                spec = without_trivial_axes(DTensorSpec.make(mesh, parse_spec(operation.args[1]), result.meta))
                self._constraints.setdefault(operand, []).append((result, spec))
        read = {value for o in graph.operations if o.op not in CONSTRAINTS for value in o.operands}
        self._read = read.union(graph.outputs)

    def of(self, values: Iterable[Value], layout: Layout) -> frozenset[Value]:
        """All values of the program that a value of the plan is an image of.

        Args:
            values: the values that it is an image of if constraints are not considered.
            layout: its layout.

        Returns:
            `values`, and the results of the constraints on them that the layout meets, or that only other constraints
            read: a plan may go from one to the next.
        """
        found = set(values)
        waiting = sorted(found, key=lambda value: value.name)
        while waiting:
            for result, spec in self._constraints.get(waiting.pop(), ()):
                if result not in found and (result not in self._read or is_laid_out(layout, spec)):
                    found.add(result)
                    waiting.append(result)
        return frozenset(found)


def is_laid_out(layout: Layout, spec: DTensorSpec) -> bool:
    """Whether a layout over atoms places the same elements on every rank, in the same order, as a physical spec.

    Args:
        layout: a layout.
        spec: a spec over physical dims, without mesh axes of size 1.
    """
    order = [axis for axes in spec.dims for axis in axes]
    return carry_over(spec, layout.atoms, order) == layout.spec and (
        physical_dims(layout.spec.dims, layout.atoms) == spec.dims
    )


def restacked(program: Graph, item: frozenset[Value], turn: frozenset[Value]) -> frozenset[Value]:
    """The stacks of a program whose items a loop stacks again, from what an item and its trip are images of."""
    reads = (operation for operation in program.operations if operation.op is ITEM)
    return frozenset(o.operands[0] for o in reads if o.tensors[0] in item and o.operands[1] in turn)


def find_origins(plan: PlanData) -> dict[Operation, int]:
    """For each operation of a plan, the number of the program's operation that it executes.

    `MARKERS` execute none, nor do loops that stack what they have read, to leave it to others.
    """
    program = plan.request.graph
    images = Images(program, plan.mesh)
    by_result = {value: number for number, o in enumerate(program.operations) for value in o.tensors}
    by_call: dict[Hashable, list[int]] = {}
    for number, operation in enumerate(program.operations):
        by_call.setdefault(_call(operation), []).append(number)
    found = {value: frozenset([own]) for value, own in zip(plan.graph.inputs, program.inputs, strict=True)}
    constants = zip(plan.graph.constants, program.constants, strict=True)
    found |= {value: frozenset([own]) for (value, _), (own, _) in constants}
    found = {value: images.of(own, plan.layout(value)) for value, own in found.items()}
    origins: dict[Operation, int] = {}
    for operation in plan.graph.operations:
        if operation.op in MARKERS:
            (operand,), (result,) = operation.operands, operation.tensors
            found[result] = images.of(found[operand], plan.layout(result))
            continue
        known = [by_result[value] for value in operation.tensors if value in by_result]
        alike = known or [
            n for n in by_call.get(_call(operation), ()) if _takes(operation, program.operations[n], found)
        ]
        if alike:
            origins[operation] = alike[0]
            own = [frozenset([value]) for value in program.operations[alike[0]].tensors]
        else:
            own = [restacked(program, *map(found.__getitem__, operation.operands))]
        for value, values in zip(operation.tensors, own, strict=True):
            found[value] = images.of(values, plan.layout(value))
    return origins


def _takes(operation: Operation, origin: Operation, found: dict[Value, frozenset[Value]]) -> bool:
    return all(own in found[value] for value, own in zip(operation.operands, origin.operands, strict=True))


def _call(operation: Operation) -> Hashable:
    """A key that is equal for calls of one source line that differ only in which tensors they take."""
    hide = lambda leaf: leaf.meta if isinstance(leaf, Value) else leaf  # noqa: E731
    arguments = map_leaves(hide, (operation.args, dict(operation.kwargs)))
    return operation.op, freeze(arguments), operation.source
