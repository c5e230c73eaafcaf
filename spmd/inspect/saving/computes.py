"""The check that a plan computes its program; a plan from a file must pass it before it runs.

Every operation of the plan executes an operation of the program, on images (`spmd.inspect.saving.images`) of its
operands. Its strategies are among those of its rule, and its operands and results have the placements of these
strategies. Data moves only by redistribution; a relabelling leaves the shard of every rank as it is. The results are
images of the program's results and have the requested specs.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from spmd.collectives.manual import ENTER, LEAVE, ManualAxes, global_spec, region_axes
from spmd.core.placement import Placement, Replicate, Shard, supports_reduction
from spmd.core.spec import DTensorSpec
from spmd.errors import PlanError
from spmd.inspect.saving.images import is_laid_out
from spmd.ir.dataflow import independent_values
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import REDISTRIBUTE
from spmd.ir.regions import LOOP, STACK
from spmd.plan.data.draft import SAME_TENSOR, logical_meta, physical_shape, spec_of
from spmd.plan.data.layout import Layout
from spmd.plan.search.boundary import CONSTRAINTS, carry_over, physical_dims, without_trivial_axes
from spmd.plan.search.candidates import runs_together
from spmd.plan.search.prepare import Prepared
from spmd.rules.strategy import LogicalShape, Strategy


@attrs.frozen(eq=False)
class Restored:
    """The parts of a plan that a document holds; the fields are those of `PlanData`."""

    graph: Graph
    logical: Mapping[Value, LogicalShape]
    specs: Mapping[Value, DTensorSpec]
    strategies: Mapping[Operation, Mapping[str, Strategy]]
    fallbacks: tuple[Operation, ...]
    gap: float


@attrs.frozen(eq=False)
class Origins:
    """The parts of the program that the parts of its plan come from.

    Args:
        values: for each value of the plan, the values of the program that it is an image of.
        operations: for each operation of the plan, the operation of the program that it executes; None for markers.
    """

    values: Mapping[Value, frozenset[Value]]
    operations: Mapping[Operation, Operation | None]


def check_computes(plan: Restored, origins: Origins, prepared: Prepared) -> None:
    """Check that a plan computes the program of its request, and does not gather inputs of its `keep_sharded`.

    Args:
        plan: the restored plan.
        origins: the parts of the program that its parts come from.
        prepared: the request, with the strategies of its operations.

    Raises:
        PlanError: it does not; the message says which value or operation is wrong, and how.
    """
    _Check(plan, origins, prepared).run()


class _Check:
    def __init__(self, plan: Restored, origins: Origins, prepared: Prepared) -> None:
        self.plan, self.origins, self.prepared = plan, origins, prepared
        self.request = prepared.request
        self.program, self.mesh = self.request.graph, self.request.mesh
        self.independent = independent_values(self.program)
        self.manual = ManualAxes.of(self.program)
        self.never_gathered = {axis: _kept(self.program, self.request.keep_sharded, axis) for axis in self.mesh.names}
        self.order = tuple(next(iter(plan.strategies.values()), ()))

    def run(self) -> None:
        axes = {axis for axis in self.mesh.names if self.mesh.axis_size(axis) > 1}
        if any(self.origins.operations.values()) and set(self.order) != axes:
            raise wrong(f"its first operation has strategies for the axes {list(self.order)}, expected {sorted(axes)}")
        self.check_edges()
        for value, spec in self.plan.specs.items():
            self.check_value(value, spec)
        for operation, origin in self.origins.operations.items():
            if operation.op is STACK and origin is None:
                self.check_restack(operation)
            elif origin is None:
                self.check_marker(operation)
            else:
                self.check_operation(operation, origin)
        self.check_draws()
        fallbacks = [o for o, own in self.origins.operations.items() if own and own not in self.prepared.options]
        if list(self.plan.fallbacks) != fallbacks:
            raise wrong(f"its fallbacks are {list(self.plan.fallbacks)!r:.200}, expected {fallbacks!r:.200}")

    def check_edges(self) -> None:
        """Check that arguments, constants and results have the requested specs, and results are the program's."""
        for value, spec in zip(self.plan.graph.inputs, self.request.input_specs, strict=True):
            self.check_given(value, spec, "argument")
        for value, _ in self.plan.graph.constants:
            if not self.plan.specs[value].is_replicated:
                raise wrong(
                    f"the constant {value!r} is {self.plan.specs[value]}, expected the whole of it on every rank"
                )
        results, own, specs = self.plan.graph.outputs, self.program.outputs, self.request.output_specs
        if len(results) != len(own):
            raise wrong(f"it has {len(results)} results, expected {len(own)}")
        for number, (value, result, given) in enumerate(zip(results, own, specs, strict=True)):
            if result not in self.origins.values[value]:
                raise wrong(f"result {number} is {value!r}, which is not {result!r}")
            if given is not None:
                self.check_given(value, given, f"result {number}")
            elif self.plan.logical[value] != physical_shape(value.meta) or self.plan.specs[value].partial:
                raise wrong(f"result {number} {value!r} is {self.plan.specs[value]}, expected a P without partial")

    def check_given(self, value: Value, spec: DTensorSpec, what: str) -> None:
        given = without_trivial_axes(spec)
        if self.plan.logical[value] != physical_shape(value.meta) or self.plan.specs[value] != given:
            raise wrong(f"{what} {value!r} is {self.plan.specs[value]}, expected {given}")

    def check_value(self, value: Value, spec: DTensorSpec) -> None:
        refined = self.prepared.refinement.values
        known = {physical_shape(value.meta), *(refined[own] for own in self.origins.values[value])}
        if self.plan.logical[value] not in known:
            raise wrong(
                f"{value!r} has atoms {self.plan.logical[value]}, expected {' or '.join(map(str, sorted(known)))}"
            )
        for axis in (*(axis for axes in spec.dims for axis in axes), *dict(spec.partial)):
            if self.mesh.axis_size(axis) == 1:
                raise wrong(f"{value!r} is {spec}, and {axis!r} has one rank")
        manual = {axis for own in self.origins.values[value] for axis in self.manual.get(own, ())}
        for axis in sorted(manual):
            if spec.placement(axis) != Replicate():
                raise wrong(f"{value!r} is {spec}, and is what one rank holds along {axis!r}")
        for axis, op in spec.partial:
            if not supports_reduction(op, value.meta.dtype):
                raise wrong(f"{value!r} is {spec}, and {value.meta.dtype} has no {op} (over {axis!r})")

    def check_marker(self, operation: Operation) -> None:
        (operand,), (result,) = operation.operands, operation.tensors
        before, after = self.layout(operand), self.layout(result)
        if operation.op is REDISTRIBUTE:
            if before.atoms != after.atoms:
                raise wrong(f"{operation!r} changes atoms from {before.atoms} to {after.atoms}")
            self.check_never_gathered(operation)
        elif not _same_shards(before, after):
            raise wrong(f"{operation!r} moves data from {before} to {after}")

    def check_restack(self, operation: Operation) -> None:
        """Check that a loop stacks an item in each of its trips, for each row of the stack, as it is sharded."""
        (item, turn), (stack,), loop = operation.operands, operation.tensors, self.plan.graph.regions.around(operation)
        rows, *atoms = self.plan.logical[stack]
        before, after = self.plan.specs[item], self.plan.specs[stack]
        is_kept = (((),) * len(rows) + before.dims, before.partial) == (after.dims, after.partial)
        if not is_kept or self.plan.logical[item] != tuple(atoms):
            raise wrong(f"{operation!r} moves data from {before} to {after}")
        if loop is None or loop.op is not LOOP or loop.tensors != (turn,) or loop.args[0] != stack.meta.shape[0]:
            raise wrong(f"{operation!r} does not stack {stack.meta.shape[0]} items")

    def check_never_gathered(self, operation: Operation) -> None:
        (operand,), (result,) = operation.operands, operation.tensors
        for axis, values in self.never_gathered.items():
            states = [self.plan.specs[value].placement(axis) for value in (operand, result)]
            if (
                isinstance(states[0], Shard)
                and not isinstance(states[1], Shard)
                and values & self.origins.values[operand]
            ):
                raise wrong(f"{operation!r} gathers along {axis!r} what keep_sharded says to keep")

    def check_operation(self, operation: Operation, origin: Operation) -> None:
        """Check the strategies of an operation, and that its operands are the program's and are sharded accordingly."""
        for value, own in zip(operation.operands, origin.operands, strict=True):
            if own not in self.origins.values[value]:
                raise wrong(f"{operation!r} takes {value!r} for {own!r}")
        if origin.op in CONSTRAINTS:
            raise wrong(f"{operation!r} is not planned")
        chosen = self.plan.strategies.get(operation, {})
        if tuple(chosen) != self.order:
            raise wrong(f"{operation!r} has strategies for the axes {list(chosen)}, expected {list(self.order)}")
        if operation.op in (ENTER, LEAVE):
            self.check_end(operation)
            return
        self.check_strategies(operation, origin, list(chosen.values()))
        states = [(*strategy.operands, *strategy.results) for strategy in chosen.values()]
        values = zip((*operation.operands, *operation.tensors), (*origin.operands, *origin.tensors), strict=True)
        for position, (value, own) in enumerate(values):
            self.check_placements(
                operation, value, own, {axis: s[position] for axis, s in zip(chosen, states, strict=True)}
            )

    def check_end(self, operation: Operation) -> None:
        """Check that a global value has the program's spec where it enters or leaves a manual region."""
        (operand,), (result,) = operation.operands, operation.tensors
        outside, inside = (operand, result) if operation.op is ENTER else (result, operand)
        spec, held = without_trivial_axes(global_spec(operation, self.mesh)), self.plan.specs[outside]
        axes, atoms = region_axes(operation), self.plan.logical[outside]
        kept = carry_over(spec, atoms, self.order)
        own = tuple(tuple(axis for axis in dim if axis in axes) for dim in held.dims)
        mixed = any(wanted and dim != wanted for dim, wanted in zip(held.dims, kept.dims, strict=True))
        partial = tuple(item for item in held.partial if item[0] in axes)
        if own != kept.dims or mixed or partial != spec.partial or physical_dims(kept.dims, atoms) != spec.dims:
            raise wrong(f"{outside!r} has {held} where {operation!r} is {spec}")
        for axis in set(self.order) - set(axes):
            pair = [self.plan.specs[value].placement(axis) for value in (outside, inside)]
            allowed = [(s.operands[0], s.results[0]) for s in self.prepared.options.get(self.origin(operation), ())]
            found = tuple(pair if operation.op is ENTER else pair[::-1])
            if found not in allowed and found != (Replicate(), Replicate()):
                raise wrong(f"{operation!r} goes from {found[0]} to {found[1]} along {axis!r}")

    def origin(self, operation: Operation) -> Operation:
        """The operation of the program that an operation of the plan executes."""
        found = self.origins.operations[operation]
        assert found is not None, "markers are checked by themselves"
        return found

    def check_strategies(self, operation: Operation, origin: Operation, chosen: list[Strategy]) -> None:
        """Check that the strategies on several axes may be combined, as in the search."""
        for number, strategy in enumerate(chosen):
            if not all(runs_together(strategy, other) for other in chosen[:number]):
                raise wrong(f"{operation!r} has strategies that do not go together: {[s.label for s in chosen]}")
            states = (*strategy.operands, *strategy.results)
            whole = origin.tensors and self.independent.issuperset(origin.tensors)
            if whole and any(state != Replicate() for state in states):
                raise wrong(
                    f"{operation!r} depends on no argument, and runs as {strategy.label!r}, not whole on every rank"
                )

    def check_placements(self, operation: Operation, value: Value, own: Value, states: Mapping[str, Placement]) -> None:
        atoms = self.prepared.refinement.values[own]
        meta = logical_meta(own.meta, atoms)
        expected = spec_of(self.mesh, states, meta)
        if self.plan.logical[value] != atoms or self.plan.specs[value] != expected:
            raise wrong(f"{value!r} has {self.plan.specs[value]} where {operation!r} is {expected}")

    def check_draws(self) -> None:
        """Check that each random operator runs once, in the order of the program."""
        drawn = [own for own in self.origins.operations.values() if own is not None and own.is_random]
        expected = [operation for operation in self.program.operations if operation.is_random]
        if drawn != expected:
            raise wrong(f"it draws random numbers by {drawn!r:.200}, expected {expected!r:.200}")

    def layout(self, value: Value) -> Layout:
        return Layout(self.plan.specs[value], self.plan.logical[value])


def wrong(reason: str) -> PlanError:
    """The error for a plan that does not compute its program."""
    return PlanError(f"The saved plan does not do what the program does: {reason}. Plan again, and save the new plan.")


def _same_shards(one: Layout, other: Layout) -> bool:
    """Whether two layouts of one tensor place the same elements on every rank, in the same order.

    One of them must be over physical dims (one atom per dim), else the answer is False.
    """
    for plain, refined in ((one, other), (other, one)):
        if all(len(atoms) == 1 for atoms in plain.atoms):
            return is_laid_out(refined, plain.spec)
    return False


def _kept(program: Graph, keep_sharded: Mapping[int, frozenset[str]], axis: str) -> frozenset[Value]:
    """The values that are never gathered along an axis: inputs, and views, casts and constraints of them."""
    kept = {program.inputs[number] for number, axes in keep_sharded.items() if axis in axes}
    for operation in program.operations if kept else ():
        if operation.is_view or operation.op in SAME_TENSOR or operation.op in CONSTRAINTS:
            kept.update(result for result in operation.tensors if operation.operands[0] in kept)
    return frozenset(kept)
