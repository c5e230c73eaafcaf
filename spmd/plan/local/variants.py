"""The plan of ranks whose shards in manual regions have other shapes than those of coordinate zero.

One plan serves all ranks. It was made for the program of coordinate zero; another rank's program differs from that
inside of manual regions only. So its plan has the same operations outside, in the same order, and its own inside.
"""

from __future__ import annotations

import attrs

from spmd.collectives.manual import ENTER, LEAVE
from spmd.core.mesh import Coordinate
from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph, Operation, Value
from spmd.plan.data.draft import physical_shape
from spmd.plan.data.plan import PlanData
from spmd.tracing.manual.correspondence import Correspondence, Inside, leave_key


def plan_at(plan: PlanData, coordinate: Coordinate) -> PlanData:
    """The plan of the rank at a coordinate: the plan itself, unless the rank's shards in regions have other shapes."""
    variants = plan.request.graph.variants
    graph = None if variants is None else variants.at(coordinate)
    return plan if graph is None else _Merge(plan, graph, coordinate).run()


class _Merge:
    """The plan of coordinate zero with another rank's operations inside of regions."""

    def __init__(self, plan: PlanData, graph: Graph, coordinate: Coordinate) -> None:
        self.plan, self.graph = plan, graph
        self.match = Correspondence(plan.request.graph, graph, coordinate)
        self.producers = graph.producers
        self.order = {operation: number for number, operation in enumerate(graph.operations)}
        self.outside = {its: value for value, its in self.match.outside.items()}
        self.emitted: set[Operation] = set()
        self.operations: list[Operation] = []
        self.added: list[Value] = [value for value, _ in graph.constants]

    def run(self) -> PlanData:
        """The merged plan."""
        inside = Inside(self.plan.graph)
        for operation in self.plan.graph.operations:
            if operation in inside.loop_of:
                self._loop(operation, inside)
            elif operation.op is ENTER:
                self._enter(operation)
            elif operation.op is LEAVE:
                self._leave(operation, inside)
            elif inside.has_effect(operation):
                self._needed(self.match.effects[operation.tensors[0]])
            elif not inside.holds(operation):
                self.operations.append(operation)
        constants = (*self.plan.graph.constants, *self.graph.constants)
        operations = tuple(self._used(inside))
        graph = attrs.evolve(self.plan.graph, constants=constants, operations=operations).verify()
        mesh = self.plan.mesh
        logical = {value: physical_shape(value.meta) for value in self.added}
        specs = {value: DTensorSpec.replicated(mesh, value.meta) for value in self.added}
        return attrs.evolve(
            self.plan, graph=graph, logical={**self.plan.logical, **logical}, specs={**self.plan.specs, **specs}
        )

    def _used(self, inside: Inside) -> list[Operation]:
        """The operations without those that coordinate zero's bodies compute from nothing, and only these use.

        Unused ones outside stay: all ranks must reshard their operands.
        """
        used, kept = set(self.plan.graph.outputs), []
        for operation in reversed(self.operations):
            if not inside.is_free(operation) or not used.isdisjoint(operation.tensors):
                used.update(operation.operands)
                kept.append(operation)
        return kept[::-1]

    def _loop(self, operation: Operation, inside: Inside) -> None:
        """At the beginning of a loop or a branch with effects inside of a region, the other program's that has them."""
        loop = inside.loops[inside.loop_of[operation]]
        first = next(filter(inside.has_effect, loop), None)
        if operation is loop[0] and first is not None:
            theirs = self.match.manual[1]
            self._needed(theirs.loops[theirs.loop_of[self.match.effects[first.tensors[0]]]][-1])

    def _enter(self, operation: Operation) -> None:
        theirs = self.match.entered.get(operation.tensors[0])
        if theirs is None:  # nothing on this rank needs it
            return
        (value,) = theirs.operands
        given = value if value in self.match.manual[1].values else operation.args[0]
        self._needed(theirs, attrs.evolve(theirs, args=(given, *theirs.args[1:])))

    def _leave(self, operation: Operation, inside: Inside) -> None:
        theirs = self.match.left[leave_key(operation)]
        if theirs.tensors[0] in self.match.manual[1].values:  # it leaves an inner region
            self._needed(theirs)
        else:
            self._needed(theirs, attrs.evolve(operation, args=(theirs.args[0], *operation.args[1:])), adds=False)

    def _needed(self, operation: Operation, placed: Operation | None = None, adds: bool = True) -> None:
        """Emit an operation of the other program, in a changed form if given, after all that it needs.

        Of a loop or a branch all operations are needed, in their order.
        """
        theirs = self.match.manual[1]
        found: set[Operation] = set()
        pending = [*(placed or operation).operands, *self._together(operation)]
        while pending:
            made = self.producers.get(pending.pop())
            if made is not None and made not in self.emitted | found and not theirs.is_anchor(made):
                found.add(made)
                pending.extend((*made.operands, *self._together(made)))
        for made in sorted(found - {operation}, key=self.order.__getitem__):
            self._emit(made, made)
        if operation not in self.emitted:
            self._emit(operation, placed or operation, adds)

    def _together(self, operation: Operation) -> list[Value]:
        """The results of all operations of the loop or branch in which one stands."""
        theirs = self.match.manual[1]
        loop = theirs.loops[theirs.loop_of[operation]] if operation in theirs.loop_of else ()
        return [value for made in loop for value in made.tensors]

    def _emit(self, operation: Operation, placed: Operation, adds: bool = True) -> None:
        self.emitted.add(operation)
        self.operations.append(placed.substitute(self.outside))
        self.added += placed.tensors if adds else ()
