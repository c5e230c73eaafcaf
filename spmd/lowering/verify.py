"""The checker of local programs that tests run after every lowering."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from spmd.core.mesh import Coordinate
from spmd.core.spec import TensorMeta
from spmd.errors import PlanError
from spmd.lowering.passes.clean import (
    drop_dead_local_nodes,
    drop_dead_nodes,
    drop_identities,
    is_random_node,
    merge_reshapes,
    share_local_subexpressions,
)
from spmd.lowering.program import LocalProgram, is_primitive


def verify(program: LocalProgram, coordinates: Iterable[Coordinate] | None = None) -> LocalProgram:
    """Check the programs of all ranks, or of the given ones, and return the program.

    Raises:
        PlanError: a node that does nothing, a local shape or dtype that the operator does not produce, inputs or
            outputs that do not have the shapes of their specs, or ranks whose sequences of primitives and random
            operators differ.
        RuntimeError: a malformed graph, from `fx.Graph.lint`.
    """
    sequences = {}
    for coordinate in program.mesh.coordinates() if coordinates is None else coordinates:
        module = program.graph_module(coordinate)
        module.graph.lint()
        _check_no_idle_nodes(module.graph, bool(program.uneven))
        _check_boundary(program, module.graph, coordinate)
        _check_metas(module)
        sequences[coordinate] = [
            _stop(node) for node in module.graph.nodes if is_primitive(node) or is_random_node(node)
        ]
    first, *others = sequences
    for other in others:
        if sequences[other] != sequences[first]:
            raise PlanError(
                f"Ranks {first} and {other} communicate differently: {sequences[first]} and {sequences[other]}."
            )
    return program


def _stop(node: fx.Node) -> tuple[str, Any]:
    """What all ranks must run in the same order: a primitive's name and mesh axes, or a random operator's name."""
    name = node.target._schema.name  # type: ignore[union-attr]
    return name, tuple(node.args[-1]) if is_primitive(node) else ()  # type: ignore[arg-type]


def _check_no_idle_nodes(graph: fx.Graph, uneven: bool) -> None:
    dead = drop_dead_local_nodes if uneven else drop_dead_nodes
    for clean in (dead, merge_reshapes, drop_identities, share_local_subexpressions, dead):
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        clean(copy)
        if len(copy.nodes) != len(graph.nodes):
            kept = {node.name for node in copy.nodes}
            idle = [node.format_node() for node in graph.nodes if node.name not in kept and node.op != "output"]
            raise PlanError(f"The local program has nodes that do nothing ({clean.__name__}): {idle[:3]}.")


def _check_boundary(program: LocalProgram, graph: fx.Graph, coordinate: Coordinate) -> None:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    outputs = next(iter(reversed(graph.nodes))).args[0]
    for nodes, specs in ((inputs, program.input_specs), (outputs, program.output_specs)):
        for node, spec in zip(nodes, specs, strict=True):
            expected = TensorMeta(spec.local_shape(coordinate), spec.meta.dtype)
            if node.meta["val"] != expected:
                raise PlanError(f"{node.name} is {node.meta['val']} at {coordinate}, expected {expected} from {spec}.")


def _check_metas(module: fx.GraphModule) -> None:
    """Recompute every node on fake tensors and compare with its meta."""
    values: dict[fx.Node, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
            elif node.op == "get_attr":
                values[node] = mode.from_tensor(getattr(module, node.target))
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                _check_meta(node, values[node])


def _check_meta(node: fx.Node, value: Any) -> None:
    expected = node.meta["val"]
    metas = tuple(expected) if isinstance(expected, tuple) else (expected,)
    found = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for meta, tensor in zip(metas, found, strict=True):
        if meta is not None and TensorMeta.of(tensor) != meta:
            raise PlanError(f"{node.format_node()} gives {TensorMeta.of(tensor)}, but the program says {meta}.")
