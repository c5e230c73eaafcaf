"""One entry of the database: traced once a sample, planned, lowered and run once a combination of placements."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import attrs
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from spmd.canonicalize import canonicalize
from spmd.errors import TraceError
from spmd.graph import Graph
from spmd.lower import lower
from spmd.mesh import Mesh
from spmd.placement import Replicate
from spmd.plan import Plan, plan
from spmd.plan.boundary import carry_over
from spmd.rules import find_rule
from spmd.runtime import VirtualProgram
from spmd.spec import DTensorSpec
from spmd.testing.op_sweep.cases import Case, cases, full_name
from spmd.testing.op_sweep.placements import Combination, combinations, difference, spread
from spmd.trace import trace_flat


class Status(str, Enum):
    """What became of an entry: the worst of its combinations."""

    PASS = "pass"
    SKIPPED = "skipped"  # plain torch fails, or there is nothing to run
    UNTRACEABLE = "untraceable"  # make_fx fails too
    REFUSED = "refused"  # a TraceError: random numbers, shapes or control flow that depend on values
    ERROR = "error"
    WRONG = "wrong"
    HANG = "hang"
    CRASH = "crash"


@attrs.frozen
class Setup:
    """What is run of every entry.

    Args:
        mesh: the axes of the virtual mesh.
        samples: how many calls.
        limit: how many combinations of placements a call.
        partial: also with partial operands.
        backward: with the gradients.
    """

    mesh: dict[str, int]
    samples: int = 6
    limit: int = 200
    partial: bool = False
    backward: bool = False


@attrs.define
class Outcome:
    """The result of one entry.

    `local` counts the right combinations with a sharded operand, a sharded or partial result, and no collective;
    `sharded` those of them that have a sharded result. `fallbacks` are operators without a rule.
    """

    name: str
    status: Status = Status.SKIPPED
    combinations: int = 0
    passed: int = 0
    local: int = 0
    sharded: int = 0
    wrong: int = 0
    errors: int = 0
    fallbacks: list[str] = attrs.field(factory=list)
    failures: list[str] = attrs.field(factory=list)

    def note(self, status: Status, failure: str = "") -> None:
        """Take the result of one combination into account."""
        order = list(Status)
        if self.status is Status.SKIPPED or order.index(status) > order.index(self.status):
            self.status = status
        if failure and len(self.failures) < 4:
            self.failures.append(f"{status.value}: {failure:.400}")


def sweep_entry(entry: Any, setup: Setup) -> Outcome:
    """Run one entry."""
    outcome = Outcome(full_name(entry))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = list(cases(entry, setup.samples, setup.backward))
        except Exception as error:  # the database's own samples may need what is not there
            outcome.note(Status.SKIPPED, _text(error))
            return outcome
        for case in found:
            _sweep_case(case, setup, outcome)
    return outcome


def _sweep_case(case: Case, setup: Setup, outcome: Outcome) -> None:
    mesh = Mesh(tuple(setup.mesh), tuple(setup.mesh.values()))
    try:
        expected = case.function(*(tensor.clone() for tensor in case.tensors))
    except Exception as error:  # whatever plain torch does, there is nothing to compare with
        outcome.note(Status.SKIPPED, f"{case.label}: {_text(error)}")
        return
    if not expected or any(tensor.layout is not torch.strided for tensor in expected):
        return
    try:
        graph = canonicalize(trace_flat(case.function, case.tensors), lambda op: find_rule(op) is None)
    except Exception as error:
        outcome.note(_failed_trace(case, error), f"{case.label}: {_text(error)}")
        return
    for combination in combinations(case.tensors, mesh, setup.limit, setup.partial):
        outcome.combinations += 1
        run = _Run(case, graph, mesh, combination, expected)
        try:
            for reason in run.failures(outcome):
                outcome.wrong += 1
                outcome.note(Status.WRONG, f"{case.label}: {reason}")
                break
            else:
                outcome.passed += 1
                outcome.note(Status.PASS)
        except Exception as error:
            outcome.errors += 1
            outcome.note(Status.ERROR, f"{case.label}: {run}: {_text(error)}")


def _failed_trace(case: Case, error: Exception) -> Status:
    if isinstance(error, TraceError):
        return Status.REFUSED
    try:
        make_fx(case.function)(*case.tensors)
    except Exception:
        return Status.UNTRACEABLE
    return Status.ERROR


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.300}"


@attrs.frozen(eq=False)
class _Run:
    """One combination of placements: once with replicated results, once with results that stay where they are."""

    case: Case
    graph: Graph
    mesh: Mesh
    combination: Combination
    expected: Sequence[torch.Tensor]

    def __str__(self) -> str:
        return ", ".join("/".join(map(repr, placements)) for placements in self.combination)

    def failures(self, outcome: Outcome) -> Iterator[str]:
        operands = [
            DTensorSpec.make(self.mesh, placements, value.meta)
            for placements, value in zip(self.combination, self.graph.inputs, strict=True)
        ]
        shards = [spread(tensor, spec) for tensor, spec in zip(self.case.tensors, operands, strict=True)]
        replicated = [DTensorSpec.replicated(self.mesh, value.meta) for value in self.graph.outputs]
        found = plan(self.graph, self.mesh, operands, replicated)
        outcome.fallbacks = sorted({*outcome.fallbacks, *(str(operation.op) for operation in found.fallbacks)})
        yield from self._compare(found, shards, replicated)
        if all(spec.is_replicated for spec in operands):
            return
        left = self._left(operands)
        if left == replicated:
            return
        found = plan(self.graph, self.mesh, operands, left)
        yield from self._compare(found, shards, left)
        if not found.comms and any(any(spec.dims) for spec in operands):
            outcome.local += 1
            outcome.sharded += any(any(spec.dims) for spec in left)

    def _left(self, operands: Sequence[DTensorSpec]) -> list[DTensorSpec]:
        """The specs in which a plan leaves the results if none are asked for."""
        free = plan(attrs.evolve(self.graph, outputs=()), self.mesh, operands, ())
        return [_physical(free, value) for value in self.graph.outputs]

    def _compare(
        self, found: Plan, shards: Sequence[Sequence[torch.Tensor]], specs: Sequence[DTensorSpec]
    ) -> Iterator[str]:
        results = VirtualProgram(lower(found))(shards)
        for index, (spec, held, expected) in enumerate(zip(specs, results, self.expected, strict=True)):
            reason = difference(held, spec, expected, self.case.values)
            if reason is not None:
                yield f"{self} -> result {index} {spec.pspec!r}: {reason}"


def _physical(found: Plan, value: Any) -> DTensorSpec:
    """The spec of a value over its physical dims; replicated where there is none."""
    logical, spec = found.logical[value], found.specs[value]
    sizes = iter(spec.dims)
    dims = tuple(tuple(axis for _ in atoms for axis in next(sizes)) for atoms in logical)
    axes = found.mesh.names
    for order in (axes, axes[::-1]):
        physical = DTensorSpec(found.mesh, dims, spec.partial, value.meta)
        if carry_over(physical, logical, order) == spec:
            return physical
    return DTensorSpec.make(found.mesh, [Replicate()] * len(axes), value.meta)
