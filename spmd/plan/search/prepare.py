"""What all orders of the mesh axes share: the atoms of every value, and the strategies of every operation."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

import attrs
import torch

from spmd.ir.dataflow import independent_values
from spmd.ir.graph import Graph, Operation, Value
from spmd.plan.data.dataflow import fused_values, latency_shares
from spmd.plan.data.draft import Draft
from spmd.plan.data.request import Request
from spmd.plan.local.copied_views import copied_views
from spmd.plan.search.atoms import Refinement, refine
from spmd.plan.search.boundary import axes_of_one_dim, bound
from spmd.plan.search.folding import Folded, fold
from spmd.plan.search.options import SEARCH, SearchOptions
from spmd.plan.search.repeats import Layer, Repeat, aligned, find_repeats
from spmd.rules import find_rule
from spmd.rules.ops.random import RANDOM_RULE
from spmd.rules.rule import Factors, Rule
from spmd.rules.strategy import LogicalShape, Strategy, derive_strategies


@attrs.frozen(eq=False)
class Prepared:
    """A request, ready to be planned.

    Args:
        request: the input of the planner.
        refinement: the atoms of every value and factor.
        options: the strategies on one mesh axis of every operation that has a rule.
        copied: as in `Assignment`.
        repeats: the repeated parts of the program, with the layers of their copies; none if each is planned by itself.
        search: the options of the search.
    """

    request: Request
    refinement: Refinement
    options: Mapping[Operation, tuple[Strategy, ...]]
    copied: frozenset[Value]
    repeats: Sequence[tuple[Repeat, Sequence[Layer]]] = ()
    search: SearchOptions = SEARCH

    def unfolded(self) -> Prepared:
        """The same request, of which each layer is planned by itself."""
        return attrs.evolve(self, repeats=())

    def starts(self, orders: Iterable[Sequence[str]]) -> list[Folded]:
        """The program from which planning in each order starts; one object where the orders make no difference to it.

        Of equal layers, one stands for several.
        """
        request = self.request
        together = axes_of_one_dim(request.graph, request.mesh, request.input_specs, request.output_specs)
        known: dict[Hashable, Folded] = {}

        def start(order: Sequence[str]) -> Folded:
            nested = tuple(tuple(sorted(axes, key=order.index)) for axes in sorted(together))
            if nested not in known:
                known[nested] = fold(self.draft(order), self.repeats)
            return known[nested]

        return list(map(start, orders))

    def draft(self, order: Sequence[str]) -> Draft:
        """The draft from which planning starts, with no axis planned; `order` has the mesh axes, major first."""
        request = self.request
        bounded = bound(
            request.graph, self.refinement.values, request.mesh, request.input_specs, request.output_specs, order
        )
        return Draft(
            mesh=request.mesh,
            graph=bounded.graph,
            logical=bounded.logical,
            options=self.options,
            pinned=bounded.pinned,
            given=bounded.given,
            states={},
            strategies={},
            planned=(),
            ends=bounded.ends,
            fused=fused_values(bounded.graph) if request.machine.fuses else frozenset(),
            copied=self.copied,
            latency_shares=latency_shares(bounded.graph, request.machine.bucket_bytes),
            independent=independent_values(bounded.graph),
            never_gathered={request.graph.inputs[number]: axes for number, axes in request.keep_sharded.items()},
            reduce_dtype=request.reduce_dtype,
            gap=0.0,
            gather_seconds=request.gather_seconds,
        )


def prepare(request: Request, search: SearchOptions = SEARCH) -> Prepared:
    """Refine a program's dims into atoms and derive the strategies of each operation on one mesh axis.

    Raises:
        RuleError: a rule contradicts its operator.
    """
    repeats = aligned(find_repeats(request.graph), request.graph) if search.fold else ()
    return Prepared(request, *strategies_of(request.graph, request.rules), copied_views(request.graph), repeats, search)


def strategies_of(
    graph: Graph, rules: Mapping[torch._ops.OpOverload, Rule]
) -> tuple[Refinement, dict[Operation, tuple[Strategy, ...]]]:
    """The atoms of a canonical program, and the strategies on one mesh axis of every operation that has a rule.

    Raises:
        RuleError: a rule contradicts its operator.
    """
    factors = _factorize(graph, rules)
    refinement = refine(graph, factors)
    return refinement, _derive(graph.operations, factors, refinement)


def options_of(
    operation: Operation, logical: Mapping[Value, LogicalShape], rules: Mapping[torch._ops.OpOverload, Rule]
) -> tuple[Strategy, ...]:
    """The strategies on one mesh axis of an operation whose dims have one factor each, over the atoms of its values."""
    shapes = [logical[value] for value in (*operation.operands, *operation.tensors)]
    factors, count = rules[operation.op].factorize(operation.call()), len(operation.operands)
    dims = zip(itertools.chain(*factors.operands, *factors.results), itertools.chain(*shapes), strict=True)
    atoms = {name: sizes for names, sizes in dims for name in names}
    return derive_strategies(factors, atoms, (shapes[:count], shapes[count:]))


def _derive(
    operations: Iterable[Operation], factors: Mapping[Operation, Factors], refinement: Refinement
) -> dict[Operation, tuple[Strategy, ...]]:
    """The strategies on one mesh axis of every operation that has factors, over the atoms of the program."""
    known: dict[Hashable, tuple[Strategy, ...]] = {}
    found = {}
    for operation in operations:
        if operation not in factors:
            continue
        logical = tuple(refinement.values[value] for value in (*operation.operands, *operation.tensors))
        atoms = refinement.factors[operation]
        key = (id(factors[operation]), tuple(atoms.items()), logical)
        if key not in known:
            count = len(operation.operands)
            known[key] = derive_strategies(factors[operation], atoms, (logical[:count], logical[count:]))
        found[operation] = known[key]
    return found


def _factorize(graph: Graph, rules: Mapping[torch._ops.OpOverload, Rule]) -> dict[Operation, Factors]:
    """The factors of every operation that has a rule; one object for identical calls."""
    known: dict[Hashable, Factors] = {}
    found = {}
    for operation in graph.operations:
        rule = RANDOM_RULE if operation.is_random else find_rule(operation.op, rules)
        if rule is None:
            continue
        key = operation.form, operation.metas
        if key not in known:
            known[key] = rule.factorize(operation.call())
        found[operation] = known[key]
    return found
