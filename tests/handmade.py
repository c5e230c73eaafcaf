"""Plans written by hand: a few operations with the specs that the test wants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from spmd.api.values.distribute import distribute
from spmd.api.values.dtensor import DTensor, wrap
from spmd.core.mesh import Mesh
from spmd.core.placement import Replicate
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.inspect.plan import Plan
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import REDISTRIBUTE, RELABEL
from spmd.ir.source import Source
from spmd.lowering.lower import LocalProgram, lower
from spmd.lowering.verify import verify
from spmd.plan.cost.account import account
from spmd.plan.data.request import Request
from spmd.rules.strategy import Strategy
from spmd.runtime import VirtualProgram


class PlanBuilder:
    """Writes a plan operation by operation; specs are over logical dims, `atoms` are one a dim unless given."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.inputs: list[Value] = []
        self.constants: list[tuple[Value, torch.Tensor]] = []
        self.operations: list[Operation] = []
        self.logical: dict[Value, tuple[tuple[int, ...], ...]] = {}
        self.specs: dict[Value, DTensorSpec] = {}
        self.strategies: dict[Operation, dict[str, Strategy]] = {}

    def value(self, name: str, meta: TensorMeta, spec: P, atoms: Sequence[Sequence[int]] | None = None) -> Value:
        value = Value(name, meta)
        self.logical[value] = tuple(map(tuple, atoms or [(size,) for size in meta.shape]))
        shape = tuple(size for group in self.logical[value] for size in group)
        assert tuple(map(math.prod, self.logical[value])) == meta.shape
        self.specs[value] = DTensorSpec.make(self.mesh, spec, TensorMeta(shape, meta.dtype))
        return value

    def input(self, name: str, shape: Sequence[int], spec: P, dtype: torch.dtype = torch.float32) -> Value:
        self.inputs.append(self.value(name, TensorMeta(shape, dtype), spec))
        return self.inputs[-1]

    def constant(self, tensor: torch.Tensor) -> Value:
        value = self.value(f"c{len(self.constants)}", TensorMeta.of(tensor), P())
        self.constants.append((value, tensor))
        return value

    def call(
        self,
        op: Any,
        args: Sequence[Any],
        results: Sequence[tuple[Sequence[int], P]],
        *,
        atoms: Sequence[Sequence[int]] | None = None,
        kwargs: dict[str, Any] | None = None,
        group: int | None = None,
        body: Any = None,
        axes: Sequence[str] = (),
    ) -> Any:
        """An operator; the single result, or all of them."""
        values = tuple(
            self.value(f"v{len(self.specs)}_{index}", TensorMeta(shape, torch.float32), spec, atoms)
            for index, (shape, spec) in enumerate(results)
        )
        source = Source("model.py", len(self.operations) + 1)
        operation = Operation(op, tuple(args), kwargs or {}, values, source, group)
        self.operations.append(operation)
        unused = tuple(Replicate() for _ in operation.operands), tuple(Replicate() for _ in values)
        self.strategies[operation] = {axis: Strategy(*unused, body=body) for axis in axes}
        return values[0] if len(values) == 1 else values

    def move(self, value: Value, spec: P) -> Value:
        result = self.value(f"{value.name}_moved{len(self.specs)}", value.meta, spec, self.logical[value])
        self.operations.append(Operation(REDISTRIBUTE, (value,), {}, (result,), None))
        return result

    def relabel(self, value: Value, atoms: Sequence[Sequence[int]], spec: P) -> Value:
        result = self.value(f"{value.name}_as{len(self.specs)}", value.meta, spec, atoms)
        self.operations.append(Operation(RELABEL, (value,), {}, (result,), None))
        return result

    def plan(self, *outputs: Value) -> Plan:
        graph = Graph(tuple(self.inputs), tuple(self.constants), tuple(self.operations), outputs).verify()
        request = Request(graph, self.mesh, (), ())
        plan = Plan(request, self.mesh, graph, self.logical, self.specs, self.strategies, (), 0.0, 0.0, (), None)
        return attrs.evolve(plan, comms=account(plan).all_comms)


def lowered(plan: Plan) -> LocalProgram:
    """The verified program of a plan."""
    return verify(lower(plan))


def run(plan: Plan, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The whole results of a plan on whole inputs, on the virtual runtime."""
    program = lowered(plan)
    placed: list[DTensor] = [
        distribute(tensor, spec.pspec, plan.mesh) for tensor, spec in zip(inputs, program.input_specs, strict=True)
    ]
    results = VirtualProgram(program)([tensor.shards for tensor in placed])
    return [wrap(spec, shards).full_tensor() for spec, shards in zip(program.output_specs, results, strict=True)]


def operators(program: LocalProgram) -> list[str]:
    """The short names of the operators of rank zero, in order."""
    expressions = [line.partition(" = ")[2] for line in program.as_text().splitlines() if " = " in line]
    return [name for name, _, _ in (expression.partition("(") for expression in expressions) if name.isidentifier()]
