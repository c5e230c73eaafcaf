"""Runs one database entry: traced once per sample; planned, lowered and run once per combination of placements."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import attrs
import torch
from torch.fx.experimental import proxy_tensor

from proofs.op_sweep.cases import Case, cases, full_name
from proofs.op_sweep.eager import eager_cases, sweep_eager_case
from proofs.op_sweep.expected import expected_of, seed
from proofs.op_sweep.layouts import layout_cases
from proofs.op_sweep.outcome import Outcome, Status, said_by
from proofs.op_sweep.placements import Combination, combination_text, combinations, difference, spread
from proofs.op_sweep.setups import Setup
from spmd.core.mesh import Mesh
from spmd.core.placement import Replicate
from spmd.core.spec import DTensorSpec
from spmd.errors import TraceError
from spmd.ir.graph import Graph
from spmd.lowering.lower import lower
from spmd.plan.data.plan import PlanData
from spmd.plan.data.request import Request
from spmd.plan.search.boundary import carry_over
from spmd.plan.search.orders import plan
from spmd.rules import find_rule
from spmd.runtime import VirtualProgram
from spmd.tracing.canonicalize.canonicalize import canonicalize
from spmd.tracing.trace import trace_flat


def sweep_entry(entry: Any, setup: Setup) -> Outcome:
    """Run one entry."""
    outcome = Outcome(full_name(entry))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if setup.eager:
                found = list(eager_cases(entry, setup))
            elif setup.layouts:
                found = list(layout_cases(entry, setup.samples, setup.backward, setup.device))
            else:
                found = list(cases(entry, setup.samples, setup.backward, setup.lengths, setup.device))
        except Exception as error:  # the database's own samples may need packages that are not installed
            outcome.note(Status.SKIPPED, said_by(error))
            return outcome
        if not found:
            outcome.note(Status.SKIPPED, f"no call with dense tensors{' and a gradient' if setup.backward else ''}")
        mesh = Mesh(tuple(setup.mesh), tuple(setup.mesh.values()), device=torch.device(setup.device))
        for case in found:
            if setup.eager:
                sweep_eager_case(case, mesh, setup, outcome)
                continue
            chosen = combinations(case.tensors, mesh, setup.limit, setup.partial)
            sweep_case(case, mesh, lambda _: chosen, outcome, make_fx=setup.make_fx)  # noqa: B023  # called at once
    return outcome


def sweep_case(
    case: Case, mesh: Mesh, choose: Callable[[Graph], Iterable[Combination]], outcome: Outcome, *, make_fx: bool = False
) -> None:
    """Run one call with some placements of its tensors against plain torch.

    Args:
        case: the call.
        mesh: the mesh.
        choose: from the call's graph, the placements to run.
        outcome: counts the results.
        make_fx: also check whether torch's `make_fx` traces the call.
    """
    expected = expected_of(case, lambda: case.function(*(tensor.clone() for tensor in case.tensors)), outcome)
    if expected is None:
        return
    outcome.lengths = sorted({*outcome.lengths, *(length for tensor in case.tensors for length in tensor.shape)})
    before = outcome.wrong + outcome.errors + outcome.refused
    graph = _trace(case, outcome)
    if graph is not None:
        for combination in choose(graph):
            _sweep_combination(_Run(case, graph, mesh, combination, expected), outcome)
    if make_fx and make_fx_traces(case):
        outcome.traced += 1
        outcome.unmatched += outcome.wrong + outcome.errors + outcome.refused > before


def _direct(case: Case) -> Case:
    """The case without copies of its operands; with copies if plain torch fails without them, as for some layouts."""
    if case.direct is None:
        return case
    try:
        case.direct(*(tensor.clone() for tensor in case.tensors))
    except Exception:
        return case
    return attrs.evolve(case, function=case.direct, direct=case.function)


def _trace(case: Case, outcome: Outcome) -> Graph | None:
    try:
        return canonical(case)
    except Exception as error:
        refused = isinstance(error, TraceError)
        untraceable = not make_fx_traces(case)
        outcome.refused += refused or untraceable
        if not (refused or untraceable):
            outcome.errors += 1
            outcome.combinations += 1
        status = Status.UNTRACEABLE if untraceable else Status.REFUSED if refused else Status.ERROR
        outcome.note(status, f"{case.label}: {said_by(error)}")
        return None


def canonical(case: Case) -> Graph:
    """The program of a call.

    Raises:
        TraceError: the call cannot be traced.
    """
    try:
        graph = trace_flat(case.function, case.tensors)
    except TraceError:
        if case.direct is None:
            raise
        graph = trace_flat(case.direct, case.tensors)  # the other one may write to its arguments
    return canonicalize(graph, lambda op: find_rule(op) is None)


def make_fx_traces(case: Case) -> bool:
    """Whether torch's own tracer traces a call."""
    try:
        proxy_tensor.make_fx(case.function, tracing_mode="fake")(*case.tensors)
    except Exception:
        return False
    return True


def _sweep_combination(run: _Run, outcome: Outcome) -> None:
    outcome.combinations += 1
    try:
        reason = next(run.failures(outcome), None)
    except Exception as error:
        outcome.errors += 1
        outcome.note(Status.ERROR, f"{run.case.label}: {run}: {said_by(error)}")
        return
    if reason is not None:
        outcome.wrong += 1
        outcome.note(Status.WRONG, f"{run.case.label}: {reason}")
        return
    outcome.passed += 1
    outcome.uneven += any(not spec.is_even for spec in run.operands)
    outcome.empty += any(map(_has_empty_shard, run.operands))
    outcome.note(Status.PASS)


def _has_empty_shard(spec: DTensorSpec) -> bool:
    """Whether the last rank, which has the smallest shard, has no elements of a sharded dim."""
    last = spec.local_shape(tuple(size - 1 for size in spec.mesh.sizes))
    return any(axes and not length for axes, length in zip(spec.dims, last, strict=True))


@attrs.frozen(eq=False)
class _Run:
    """One combination of placements: run with replicated results, then with results in the specs the plan leaves."""

    case: Case
    graph: Graph
    mesh: Mesh
    combination: Combination
    expected: Sequence[torch.Tensor]

    def __str__(self) -> str:
        return combination_text(self.combination)

    @cached_property
    def operands(self) -> list[DTensorSpec]:
        return [
            DTensorSpec.make(self.mesh, placements, value.meta)
            for placements, value in zip(self.combination, self.graph.inputs, strict=True)
        ]

    def failures(self, outcome: Outcome) -> Iterator[str]:
        operands = self.operands
        shards = [spread(tensor, spec) for tensor, spec in zip(self.case.tensors, operands, strict=True)]
        replicated = [DTensorSpec.replicated(self.mesh, value.meta) for value in self.graph.outputs]
        found = plan(Request(self.graph, self.mesh, operands, replicated))
        outcome.fallbacks = sorted({*outcome.fallbacks, *(str(operation.op) for operation in found.fallbacks)})
        yield from self._compare(found, shards, replicated)
        if all(spec.is_replicated for spec in operands):
            return
        left = self._left(operands)
        if left == replicated:
            return
        found = plan(Request(self.graph, self.mesh, operands, left))
        yield from self._compare(found, shards, left)
        if not found.comms and any(any(spec.dims) for spec in operands):
            outcome.local += 1
            outcome.sharded += any(any(spec.dims) for spec in left)

    def _left(self, operands: Sequence[DTensorSpec]) -> list[DTensorSpec]:
        """The specs of the results in a plan without out specs."""
        free = plan(Request(attrs.evolve(self.graph, outputs=()), self.mesh, operands, ()))
        return [_physical(free, value) for value in self.graph.outputs]

    def _compare(
        self, found: PlanData, shards: Sequence[Sequence[torch.Tensor]], specs: Sequence[DTensorSpec]
    ) -> Iterator[str]:
        program = VirtualProgram(lower(found))
        seed()
        results = program(list(map(tuple, shards)))
        for index, (spec, held, expected) in enumerate(zip(specs, results, self.expected, strict=True)):
            reason = difference(held, spec, expected, self.case.values)
            if reason is not None:
                yield f"{self} -> result {index} {spec.pspec!r}: {reason}"


def _physical(found: PlanData, value: Any) -> DTensorSpec:
    """The spec of a value over its physical dims; replicated if no such spec is equivalent to the planned one."""
    logical, spec = found.logical[value], found.specs[value]
    sizes = iter(spec.dims)
    dims = tuple(tuple(axis for _ in atoms for axis in next(sizes)) for atoms in logical)
    axes = found.mesh.names
    for order in (axes, axes[::-1]):
        physical = DTensorSpec(found.mesh, dims, spec.partial, value.meta)
        if carry_over(physical, logical, order) == spec:
            return physical
    return DTensorSpec.make(found.mesh, [Replicate()] * len(axes), value.meta)
