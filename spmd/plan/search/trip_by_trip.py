"""The plan in which loops reshard stacks item by item, in their trips, where the search has them resharded as a whole.

The search adds up times, by which both are equal. In the trips launches pass beside what these compute.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from types import MappingProxyType

import attrs

from spmd.collectives.resharding import redistribution
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.ir.dataflow import is_read_by_items
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import REDISTRIBUTE
from spmd.ir.regions import LEAVES, LOOP, STACK
from spmd.plan.cost.account import account
from spmd.plan.data.dataflow import latency_shares
from spmd.plan.data.plan import PlanData
from spmd.plan.search.join import join_redistributions
from spmd.plan.search.prepare import options_of


def trip_by_trip(plan: PlanData) -> PlanData | None:
    """The plan with all redistributions of stacks in loops; None if there are none.

    One of what a loop leaves is moved into that loop. One of what loops read is moved into the first of them, which
    leaves the items for the others.
    """
    mover = _Mover(plan)
    for operation in plan.graph.operations if plan.graph.regions else ():
        if operation.op is REDISTRIBUTE:
            with contextlib.suppress(_NoStrategyError):
                mover.move(operation)
    return mover.moved() if mover.replaced else None


class _NoStrategyError(Exception):
    """An item of a stack cannot be sharded as that."""


class _Mover:
    """The changes so far."""

    def __init__(self, plan: PlanData) -> None:
        self.plan, self.graph, self.regions = plan, plan.graph, plan.graph.regions
        self.logical, self.specs, self.strategies = dict(plan.logical), dict(plan.specs), dict(plan.strategies)
        self.replaced: dict[Operation, tuple[Operation, ...]] = {}
        """What stands in the place of operations."""
        self.inserted: dict[Operation, list[Operation]] = defaultdict(list)
        """What stands before operations."""
        self.joins: set[Value] = set()
        """Values that are redistributed twice in a row."""

    def move(self, operation: Operation) -> None:
        """Move a redistribution into a loop, if it is of a stack whose items no rank misses."""
        (whole,), (moved,) = operation.operands, operation.tensors
        ends = self.specs[whole], self.specs[moved]
        rows = len(self.logical[whole][0]) if self.logical[whole] else 0
        if any(axes for spec in ends for axes in spec.dims[:rows]):
            return
        if not any(step.is_collective for step in redistribution(*ends, self.plan.request.reduce_dtype)):
            return
        maker, readers = self.graph.producers.get(whole), self.graph.consumers.get(moved, ())
        if maker is not None and maker.op is STACK:
            if self.graph.consumers[whole] == (operation,) and whole not in self.graph.outputs:
                self.into_maker(operation, maker)
        elif readers and is_read_by_items(self.graph, moved):
            self.into_reader(operation, readers)

    def into_maker(self, operation: Operation, stack: Operation) -> None:
        """Redistribute items before they are stacked."""
        (moved,), y = operation.tensors, stack.operands[0]
        item = self.item_of(moved, f"{y.name}_moved")
        placed = self.placed(attrs.evolve(stack, args=(item, *stack.args[1:]), results=(moved,)))
        (loop, *_), maker = self.regions.path(stack), self.graph.producers.get(y)
        members = self.regions.members(loop)
        place = stack
        if maker in self.replaced:  # an item, which is redistributed where it is first read
            self.joins |= {y}
        elif maker is not None and maker in members and maker.op not in LEAVES:
            place = members[members.index(maker) + 1]
            self.joins |= {y} if maker.op is REDISTRIBUTE else set()
        self.inserted[place].append(attrs.evolve(operation, args=(y,), results=(item,), source=stack.source))
        self.replaced |= {operation: (), stack: (placed,)}

    def into_reader(self, operation: Operation, items: tuple[Operation, ...]) -> None:
        """Redistribute the items of the first loop that reads them."""
        (whole,), (moved,), (first, *others) = operation.operands, operation.tensors, items
        (loop, *around), (read,), turn = self.regions.path(first), first.tensors, first.args[1]
        if loop.op is not LOOP or loop.args[0] != whole.meta.shape[0] or around != self.regions.path(operation):
            return
        if any(loop in self.regions.path(other) for other in others):
            return
        item = self.item_of(whole, f"{read.name}_sharded")
        placed = self.placed(attrs.evolve(first, args=(whole, turn), results=(item,)))
        inserted = [attrs.evolve(operation, args=(item,), results=(read,))]
        if others:
            inserted.append(self.placed(Operation(STACK, (read, turn, loop.args[0]), {}, (moved,), first.source)))
        self.inserted[self.first_use(loop, read)] += inserted
        self.replaced |= {operation: (), first: (placed,)}

    def item_of(self, stack: Value, name: str) -> Value:
        """A new value for an item of a stack, sharded as that."""
        item = Value(name, TensorMeta(stack.meta.shape[1:], stack.meta.dtype))
        spec, rows = self.specs[stack], len(self.logical[stack][0])
        self.logical[item] = self.logical[stack][1:]
        self.specs[item] = DTensorSpec(
            spec.mesh, spec.dims[rows:], spec.partial, TensorMeta(spec.meta.shape[rows:], spec.meta.dtype)
        )
        return item

    def placed(self, operation: Operation) -> Operation:
        """A new operation, with the strategy of its rule that has the specs of its values.

        Raises:
            _NoStrategyError: there is none.
        """
        values = (*operation.operands, *operation.tensors)
        options = options_of(operation, self.logical, self.plan.request.rules)
        by_placements = {(*option.operands, *option.results): option for option in options}
        wanted = {axis: tuple(self.specs[value].placement(axis) for value in values) for axis in self.plan.order}
        order = self.plan.order
        known = [[axis for axis in axes if axis in order] for value in values for axes in self.specs[value].dims]
        in_order = all(axes == sorted(axes, key=order.index) for axes in known)  # placements tell no other
        if not in_order or not by_placements.keys() >= set(wanted.values()):
            raise _NoStrategyError
        self.strategies[operation] = {axis: by_placements[states] for axis, states in wanted.items()}
        return operation

    def first_use(self, loop: Operation, value: Value) -> Operation:
        """The first operation in a loop itself that reads a value, or in which another one does."""
        reader = self.graph.consumers[value][0]
        return next(each for each in (reader, *self.regions.path(reader)) if self.regions.around(each) is loop)

    def moved(self) -> PlanData:
        """The plan with the changes."""
        placed: list[Operation] = []
        for operation in self.graph.operations:
            placed += [*self.inserted[operation], *self.replaced.get(operation, (operation,))]
        graph, request = attrs.evolve(self.graph, operations=tuple(placed)), self.plan.request
        fixed = frozenset(self.specs.keys() - self.joins)
        shares = latency_shares(graph, request.machine.bucket_bytes)
        graph = join_redistributions(graph, self.specs, fixed, shares, request).verify()
        plan = attrs.evolve(
            self.plan,
            graph=graph,
            logical=MappingProxyType(self.logical),
            specs=MappingProxyType(self.specs),
            strategies=MappingProxyType({o: chosen for o, chosen in self.strategies.items() if o not in self.replaced}),
        )
        found = account(plan)
        return attrs.evolve(plan, comms=found.all_comms, seconds=found.total)
