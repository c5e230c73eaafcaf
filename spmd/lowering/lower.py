"""Lowering: from a plan to the program that each rank runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd.collectives.resharding import redistribution
from spmd.core.mesh import Coordinate
from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph
from spmd.ir.markers import REDISTRIBUTE
from spmd.lowering.emit import emit
from spmd.lowering.launches import with_records
from spmd.lowering.passes import PASSES
from spmd.lowering.passes.in_place import write_in_place
from spmd.lowering.passes.results import copy_partial_items, copy_partial_views
from spmd.lowering.program import LocalProgram
from spmd.plan.data.of_program import of_program
from spmd.plan.data.plan import PlanData
from spmd.plan.local.fragments import Known
from spmd.plan.local.variants import plan_at

__all__ = ["LocalProgram", "lower", "rank_graph"]


def lower(
    plan: PlanData,
    *,
    name: str = "program",
    passes: Sequence[Callable[[Graph], Graph]] | None = None,
) -> LocalProgram:
    """Lower a plan to the program that each rank runs.

    Programs are built lazily, when `LocalProgram.graph` first needs them: one for each set of local shapes.

    Args:
        plan: the plan.
        name: the name of the function.
        passes: the passes over each rank's program, in order; by default `PASSES`.

    Returns:
        The programs of all ranks.
    """

    def build(coordinate: Coordinate) -> Graph:
        at = plan_at(plan, coordinate)
        graph = rank_graph(at, coordinate) if passes is None else build_rank_graph(at, coordinate, passes=passes)
        return with_records(graph, plan.comms).verify()

    return LocalProgram(
        name=name,
        mesh=plan.mesh,
        input_specs=tuple(plan.specs[value] for value in plan.graph.inputs),
        output_specs=tuple(plan.specs[value] for value in plan.graph.outputs),
        uneven=_uneven_specs(plan),
        build=build,
        schedule=plan.schedule,
    )


@of_program
def rank_graph(plan: PlanData, coordinate: Coordinate) -> Graph:
    """The program of the rank at a coordinate under its plan (`plan_at`); its collectives have no records of the plan.

    Args:
        plan: the plan.
        coordinate: the mesh coordinate of the rank.
    """
    return build_rank_graph(plan, coordinate)


def build_rank_graph(
    plan: PlanData,
    coordinate: Coordinate,
    *,
    known: Known | None = None,
    passes: Sequence[Callable[[Graph], Graph]] | None = None,
) -> Graph:
    """Build the program of `rank_graph` at each call.

    Args:
        plan: the plan.
        coordinate: the mesh coordinate of the rank.
        known: as of `Fragments`.
        passes: as of `lower`.
    """
    graph = emit(plan, coordinate, known)
    for run in PASSES if passes is None else passes:
        graph = run(graph)
    place = (plan.mesh, plan.mesh.rank(coordinate))
    graph = copy_partial_items(copy_partial_views(graph, place, plan.request.donated), place)
    return write_in_place(graph, plan.request.donated)


def _uneven_specs(plan: PlanData) -> tuple[DTensorSpec, ...]:
    """The distinct uneven specs, of values and of the intermediate steps of redistributions."""
    variants = plan.request.graph.variants
    specs = dict.fromkeys((*plan.specs.values(), *(variants.unevenness.specs if variants else ())))
    for operation in plan.graph.operations:
        if operation.op is REDISTRIBUTE:
            ends = plan.specs[operation.operands[0]], plan.specs[operation.tensors[0]]
            specs |= dict.fromkeys(step.target for step in redistribution(*ends))
    return tuple(spec for spec in specs if not spec.is_even)
