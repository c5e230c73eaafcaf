"""The result of planning, which is immutable: a spec for every value and a strategy for every operation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar

import attrs
from typing_extensions import Self

from spmd.collectives.manual import manual_axes
from spmd.core.folded_lines import fold_lines
from spmd.core.mesh import Mesh, Runtime
from spmd.core.spec import DTensorSpec
from spmd.errors import PlanError
from spmd.ir.comm import Comm
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.launch_schedule import LaunchSchedule
from spmd.ir.markers import REDISTRIBUTE, RELABEL
from spmd.ir.source import Source
from spmd.plan.data.causes import Cause, find_causes
from spmd.plan.data.layout import Layout
from spmd.plan.data.request import Request
from spmd.plan.machine.machine import GIVEN, Machine
from spmd.rules.strategy import Strategy


@attrs.frozen(eq=False, repr=False)
class PlanData:
    """How a program runs on a mesh.

    Args:
        request: the input of the planner.
        mesh: the mesh.
        graph: the program, with its redistributions as explicit operations: `spmd::redistribute` moves a value from
            its spec to the spec of the result; `spmd::relabel` renames logical dims and moves nothing.
        logical: the atoms of every dim of every value.
        specs: the spec of every value, over its logical shape.
        strategies: for every operation, its strategy on each mesh axis by name (none for redistributions).
        fallbacks: operations that have no rule and run replicated.
        gap: the largest relative distance of any axis's cost from its optimum (0.01 is 1%) among plans in which equal
            layers take and make values of the same specs: 0 if every axis was searched exactly; an upper bound where
            large-neighbourhood search was used.
        seconds: predicted time of one run of the program.
        comms: the collectives that each rank runs, in order of execution.
        schedule: how processes launch collectives; None if each alone, and waited for at once, because a memory limit
            leaves no room for more.
    """

    request: Request
    mesh: Mesh
    graph: Graph
    logical: Mapping[Value, tuple[tuple[int, ...], ...]]
    specs: Mapping[Value, DTensorSpec]
    strategies: Mapping[Operation, Mapping[str, Strategy]]
    fallbacks: tuple[Operation, ...]
    gap: float
    seconds: float
    comms: tuple[Comm, ...]
    schedule: LaunchSchedule | None

    def layout(self, value: Value) -> Layout:
        """The sharding of a value, over its logical and physical dims."""
        return Layout(self.specs[value], self.logical[value], self._manual.get(value, ()))

    @cached_property
    def _manual(self) -> Mapping[Value, tuple[str, ...]]:
        """The manual axes of the values of regions."""
        return manual_axes(self.graph, self.mesh)

    @property
    def exact(self) -> bool:
        """Whether every axis was searched exactly."""
        return self.gap == 0

    @property
    def order(self) -> tuple[str, ...]:
        """The mesh axes of more than one rank, in planning order; in the mesh's where no operation has a strategy."""
        axes = (axis for axis, size in self.mesh.axes.items() if size > 1)
        return tuple(next(iter(self.strategies.values()), axes))

    @cached_property
    def causes(self) -> Mapping[Operation, Cause]:
        """The cause of each redistribution: its producer, its first consumer and the line of the user's code."""
        return MappingProxyType(find_causes(self.graph, self.layout))

    def source(self, operation: Operation) -> Source | None:
        """The line of the user's code for an operation; for a redistribution, that of its cause. None if unknown."""
        return self.causes[operation].source if operation in self.causes else operation.source

    def verify(self) -> Self:
        """Check that every value has the placements that its producer produces and its consumers require.

        Returns:
            The plan itself.

        Raises:
            PlanError: an operand or a result is sharded differently than the operation's strategies say, or a marker
                does more than it may.
            TraceError: the graph uses a value before its definition, or defines one twice.
        """
        self.graph.verify()
        for operation in self.graph.operations:
            if operation.op is REDISTRIBUTE or operation.op is RELABEL:
                self._verify_marker(operation)
                continue
            values = (*operation.operands, *operation.tensors)
            for axis, strategy in self.strategies.get(operation, {}).items():
                for value, state in zip(values, (*strategy.operands, *strategy.results), strict=True):
                    if self.specs[value].placement(axis) != state:
                        raise PlanError(
                            f"{value!r} has {self.specs[value]} where {operation!r} is {state} on {axis!r}."
                        )
        return self

    def _verify_marker(self, operation: Operation) -> None:
        (operand,), (result,) = operation.operands, operation.tensors
        if operation.op is REDISTRIBUTE and self.logical[operand] != self.logical[result]:
            raise PlanError(f"{operation!r} changes atoms from {self.logical[operand]} to {self.logical[result]}.")
        if operation.op is RELABEL and self._local_shape(operand) != self._local_shape(result):
            raise PlanError(f"{operation!r} moves data from {self.specs[operand]} to {self.specs[result]}.")

    def _local_shape(self, value: Value) -> tuple[int, ...]:
        """The physical shape of the largest shard."""
        return self.layout(value).shape((0,) * len(self.mesh.names))

    @property
    def _names_machine(self) -> bool:
        """Whether texts name the machine; not the default one of a mesh that stands for a cluster."""
        return self.mesh.runtime is Runtime.DISTRIBUTED or self.request.machine != Machine()

    def __repr__(self) -> str:
        return (
            f"Plan({len(self.graph.operations)} operations on {self.mesh}, {len(self.comms)} collectives, "
            f"{sum(comm.bytes for comm in self.comms):,.0f} bytes sent per rank, {self.seconds:.3g} s"
            f"{f', machine {self.request.machine.origin or GIVEN}' if self._names_machine else ''}"
            f"{', made for another machine' if self.request.made_elsewhere else ''})"
        )

    def __str__(self) -> str:
        lines = [f"# machine {self.request.machine}"] if self._names_machine else []
        lines += [f"# {self.request.made_elsewhere}"] if self.request.made_elsewhere else []
        lines += [f"{value!r} {self.layout(value)}" for value in self.graph.inputs]
        for operation in self.graph.operations:
            specs = ", ".join(f"{self.layout(value)}" for value in operation.tensors)
            lines.append(f"{operation!r}  # {specs} {operation.source or ''}".rstrip())
        return "\n".join(fold_lines(lines))


AnyPlan = TypeVar("AnyPlan", bound=PlanData)
"""A function that changes a plan returns one of the same class."""
