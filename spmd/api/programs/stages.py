"""The stages of compilation from a traced function to the program of a rank.

`Program` imports this module at the first plan: the planner, the rules and the lowering are half of the package, and
`import spmd` does not need them.
"""

from __future__ import annotations

import attrs

from spmd.api.programs.missing_rules import warn_of_missing_rules
from spmd.api.programs.never_gathered import never_gathered_inputs
from spmd.api.programs.options import Options
from spmd.api.programs.whole_draws import warn_of_whole_draws
from spmd.collectives.manual import drop_trivial_axes
from spmd.core.mesh import Mesh
from spmd.core.single_threaded import single_threaded
from spmd.core.spec import DTensorSpec
from spmd.inspect.plan import Plan
from spmd.ir.list_operators import FUSED
from spmd.ir.simplify import eliminate_dead
from spmd.lowering.lower import LocalProgram, lower
from spmd.plan.data.request import Request
from spmd.plan.machine.default import default_machine
from spmd.plan.memory.limit import check_fits
from spmd.plan.search.options import SEARCH
from spmd.plan.search.orders import plan
from spmd.rules import RULES, find_rule
from spmd.tracing.canonicalize.canonicalize import canonicalize
from spmd.tracing.manual.correspondence import check_variants
from spmd.tracing.optimizers.recognition import FUSED_DEVICES, fuse_optimizers
from spmd.tracing.traced import Traced


def make_plan(
    traced: Traced,
    mesh: Mesh,
    in_specs: tuple[DTensorSpec, ...],
    out_specs: tuple[DTensorSpec | None, ...],
    donated: frozenset[int],
    options: Options,
) -> Plan:
    """The plan of a traced function.

    Args:
        traced: the function.
        mesh: the mesh.
        in_specs: the spec of each input.
        out_specs: the spec of each output; None for one that the planner chooses.
        donated: the positions of the donated inputs.
        options: those of `jit`.

    Raises:
        PlanError: no plan fits in the memory limit, the plan sends more than `comms` allows, or a given plan was made
            for another program, mesh or specs.
    """
    rules = RULES if options.rules is None else options.rules
    with single_threaded():
        graph = eliminate_dead(traced.graph, collectives=traced.graph.variants is None)
        graph = canonicalize(drop_trivial_axes(graph, mesh), lambda op: find_rule(op, rules) is None)
        if mesh.device.type in FUSED_DEVICES and all(op in rules for op in FUSED):
            graph = fuse_optimizers(graph)
    check_variants(graph)
    names = [value.name for value in graph.inputs]
    request = Request(
        graph,
        mesh,
        in_specs,
        out_specs,
        rules=rules,
        machine=options.machine or default_machine(mesh),
        donated=donated,
        memory_limit=options.memory_limit,
        keep_sharded=never_gathered_inputs(options.keep_sharded, traced.input_paths, names, mesh),
        reduce_dtype=options.reduce_dtype,
        input_paths=traced.input_paths,
    )
    found = _answer(request, options)
    warn_of_missing_rules(found)
    warn_of_whole_draws(found)
    if options.comms is not None:
        options.comms.check(found, traced.name)
    return found


def _answer(request: Request, options: Options) -> Plan:
    given = options.plan
    if given is None:
        return Plan.of(plan(request, SEARCH if options.reuse_layers else attrs.evolve(SEARCH, fold=False)))
    own = options.machine is None
    found = given.transfer(request, own) if isinstance(given, Plan) else Plan.load(given, request, own)
    return check_fits(found)


def make_program(planned: Plan, name: str) -> LocalProgram:
    """The lowered program that each rank runs, with a given name."""
    return lower(planned, name=name)
