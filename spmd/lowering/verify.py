"""The checker of local programs that tests run after every lowering."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spmd.core.mesh import Coordinate
from spmd.core.spec import TensorMeta
from spmd.errors import PlanError
from spmd.ir.graph import Graph, Operation, Value, iterate_leaves, map_leaves
from spmd.ir.simplify import eliminate_dead
from spmd.lowering.passes import simplify_local
from spmd.lowering.program import LocalProgram, is_collective


def verify(program: LocalProgram, coordinates: Iterable[Coordinate] | None = None) -> LocalProgram:
    """Check the programs of all ranks, or of the given ones, and return the program.

    Raises:
        PlanError: an operation that does nothing, a local shape or dtype that the operator does not produce, inputs or
            outputs that do not have the shapes of their specs, or ranks whose sequences of operations with effects
            differ.
        TraceError: a value that is used before it is defined, or defined twice.
    """
    sequences = {}
    for coordinate in program.mesh.coordinates() if coordinates is None else coordinates:
        graph = program.graph(coordinate).verify()
        _check_no_idle_operations(graph)
        _check_boundary(program, graph, coordinate)
        _check_metas(graph)
        sequences[coordinate] = [_stop(operation) for operation in graph.operations if operation.effect is not None]
    first, *others = sequences
    for other in others:
        if sequences[other] != sequences[first]:
            raise PlanError(
                f"Ranks {first} and {other} communicate differently: {sequences[first]} and {sequences[other]}."
            )
    return program


def _stop(operation: Operation) -> tuple[str, Any]:
    """What all ranks must run in the same order: an operator's name and, for a collective, its mesh axes."""
    return operation.op._schema.name, tuple(operation.args[-1]) if is_collective(operation) else ()


def _check_no_idle_operations(graph: Graph) -> None:
    for clean in (eliminate_dead, simplify_local):
        left = clean(graph).operations
        if len(left) != len(graph.operations):
            kept = {value for operation in left for value in operation.tensors}
            idle = [operation for operation in graph.operations if kept.isdisjoint(operation.tensors)]
            raise PlanError(f"The local program has operations that do nothing ({clean.__name__}): {idle[:3]}.")


def _check_boundary(program: LocalProgram, graph: Graph, coordinate: Coordinate) -> None:
    for values, specs in ((graph.inputs, program.input_specs), (graph.outputs, program.output_specs)):
        for value, spec in zip(values, specs, strict=True):
            expected = TensorMeta(spec.local_shape(coordinate), spec.meta.dtype)
            if value.meta != expected:
                raise PlanError(f"{value.name} is {value.meta} at {coordinate}, expected {expected} from {spec}.")


def _check_metas(graph: Graph) -> None:
    """Run every operation on fake tensors and compare the results with their metas."""
    tensors: dict[Value, torch.Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for value in graph.inputs:
            tensors[value] = torch.empty(value.meta.shape, dtype=value.meta.dtype)
        for value, tensor in graph.constants:
            tensors[value] = mode.from_tensor(tensor)
        for operation in graph.operations:
            args, kwargs = map_leaves(
                lambda leaf: tensors[leaf] if isinstance(leaf, Value) else leaf,
                (operation.args, dict(operation.kwargs)),
            )
            found = list(iterate_leaves(operation.op(*args, **kwargs)))
            for result, tensor in zip(operation.results, found, strict=True):
                if result is not None:
                    _check_meta(operation, result, tensor)
                    tensors[result] = tensor


def _check_meta(operation: Operation, result: Value, tensor: torch.Tensor) -> None:
    if TensorMeta.of(tensor) != result.meta:
        raise PlanError(f"{operation!r} produces {TensorMeta.of(tensor)}, but the program says {result.meta}.")
