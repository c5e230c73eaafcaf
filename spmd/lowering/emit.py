"""Emits one rank's graph from a plan: operations on local tensors, redistributions as collectives."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from spmd.collectives.bytes_sent import max_bytes_sent
from spmd.collectives.primitives import COLLECTIVES
from spmd.collectives.resharding import redistribution
from spmd.core.mesh import Coordinate
from spmd.core.spec import TensorMeta
from spmd.ir.graph import Operation, Value, map_leaves
from spmd.ir.list_schedule import Unit, schedule
from spmd.ir.markers import REDISTRIBUTE, RELABEL
from spmd.ir.printing import operator_name
from spmd.lowering.program import is_primitive
from spmd.lowering.steps import localize_step
from spmd.plan.data.layout import Layout
from spmd.plan.data.local_calls import (
    LocalCall,
    local_implementation,
    runs_local_implementation,
    trace_local_call,
    with_local_size,
)
from spmd.plan.data.plan import PlanData
from spmd.plan.memory.rematerialization import repetitions
from spmd.rules import find_rule
from spmd.rules.rule import Body, Rule

RESHAPE = torch.ops.aten.reshape.default
_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})
"""Views that are lowered to `aten.reshape`: a shard may have other strides than the global tensor, or than the operands
with which a local implementation was traced."""


def emit(
    plan: PlanData, rules: Mapping[Any, Rule], input_names: Sequence[str], coordinate: Coordinate
) -> tuple[fx.Graph, dict[str, Any]]:
    """Emit the graph of the rank at `coordinate`, not yet optimized.

    Every node has `meta["val"]`: the TensorMeta of its local tensor (a tuple if the operator returns several). Nodes
    that stand for a value of the plan have `meta["spec"]`, a Layout; collectives have `meta["bytes"]`, `meta["cause"]`
    and `meta["source"]`; rematerialized nodes have `meta["repetition"]`, the number of earlier computations.

    Args:
        plan: the plan.
        rules: the rules that the plan was made with.
        input_names: for each input, a name or a path (`params['w']`), from which the placeholder is named.
        coordinate: the mesh coordinate of the rank.

    Returns:
        The graph, and by name the constants that its `get_attr` nodes refer to.
    """
    emitter = _Emitter(plan, rules, coordinate)
    for value, name in zip(plan.graph.inputs, input_names, strict=True):
        emitter.define(value, emitter.graph.placeholder(_identifier(name)))
    for index, (value, tensor) in enumerate(plan.graph.constants):
        emitter.define(value, emitter.constant(f"constant_{index}", tensor))
    alone = frozenset(
        o for o in plan.graph.operations if runs_local_implementation(o, plan.strategies.get(o, {}), rules)
    )
    for unit in schedule(plan.graph.operations, alone):
        emitter.emit(unit)
    emitter.graph.output(tuple(emitter.nodes[value] for value in plan.graph.outputs))
    return emitter.graph, emitter.attributes


class _Emitter:
    """The graph under construction, and the node of every value so far."""

    def __init__(self, plan: PlanData, rules: Mapping[Any, Rule], coordinate: Coordinate) -> None:
        self.plan, self.rules, self.coordinate = plan, rules, coordinate
        self.graph = fx.Graph()
        self.nodes: dict[Value, fx.Node] = {}
        self.attributes: dict[str, Any] = {}
        self.repetitions = repetitions(plan.graph, plan.specs)
        self.repetition = 0

    def local(self, value: Value) -> TensorMeta:
        return TensorMeta(self.plan.layout(value).shape(self.coordinate), value.meta.dtype)

    def define(self, value: Value, node: fx.Node) -> None:
        self.nodes[value] = node
        node.meta.update(val=self.local(value), spec=self.plan.layout(value))

    def constant(self, name: str, tensor: torch.Tensor) -> fx.Node:
        self.attributes[name] = tensor
        return self.graph.create_node("get_attr", name, name=name)

    def call(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        node = self.graph.create_node("call_function", op, args, dict(kwargs), name=f"{operator_name(op)}_1")
        if self.repetition:
            node.meta["repetition"] = self.repetition
        return node

    def body(self, operation: Operation) -> tuple[Body, tuple[str, ...]] | None:
        """The local implementation that this rank runs and its mesh axes, major first; None for the operator itself."""
        planned = local_implementation(self.plan.strategies.get(operation, {}))
        rule = find_rule(operation.op, self.rules)
        if planned is not None or rule is None or rule.empty is None:
            return planned
        return None if all(self.local(value).numel for value in operation.operands) else (rule.empty, ())

    def emit(self, unit: Unit) -> None:
        operation = unit.operations[0]
        self.repetition = self.repetitions.get(operation, 0)
        if operation.op is RELABEL:
            self.nodes[operation.tensors[0]] = self.nodes[operation.operands[0]]
        elif operation.op is REDISTRIBUTE:
            self.redistribute(operation)
        elif self.body(operation):
            self.inline_local_implementation(operation)
        else:
            self.operator(unit)

    def operator(self, unit: Unit) -> None:
        """Emit the operator itself, on local tensors and with local sizes."""
        replace = lambda leaf: self.nodes[leaf] if isinstance(leaf, Value) else leaf  # noqa: E731
        operation = unit.operations[0]
        args = tuple(map_leaves(replace, unit.args))
        kwargs = map_leaves(replace, dict(unit.kwargs))
        rule = find_rule(unit.op, self.rules) if len(unit.operations) == 1 else None
        if rule is not None and rule.size_argument is not None:
            args = with_local_size(args, rule.size_argument, self.local(operation.tensors[0]).shape)
        op = RESHAPE if unit.op in _VIEWS else unit.op
        node = self.call(op, args, kwargs)
        node.meta["source"] = operation.source
        if len(unit.operations) > 1:
            self.unpack(node, tuple(operation.results[0] for operation in unit.operations))
        elif _returns_one_tensor(op):
            self.define(operation.tensors[0], node)
        else:
            self.unpack(node, operation.results)

    def unpack(self, node: fx.Node, results: tuple[Value | None, ...]) -> None:
        node.meta["val"] = tuple(None if value is None else self.local(value) for value in results)
        for index, value in enumerate(results):
            if value is not None:
                item = self.graph.create_node("call_function", operator.getitem, (node, index), name=node.name)
                self.define(value, item)

    def redistribute(self, operation: Operation) -> None:
        """Emit the steps from the operand's spec to the result's, each over physical dims where possible."""
        (value,), (result,) = operation.operands, operation.tensors
        node, atoms = self.nodes[value], self.plan.logical[result]
        shape = self.local(value).shape
        cause = self.plan.causes[operation]
        for step in redistribution(self.plan.specs[value], self.plan.specs[result]):
            local = localize_step(step, atoms, self.coordinate)
            node = self.reshape(node, shape, local.view)
            node = self.call(local.step.primitive, (node, *local.step.arguments(self.coordinate)), {})
            node.meta["val"] = TensorMeta(local.step.target.local_shape(self.coordinate), value.meta.dtype)
            node.meta["spec"] = Layout(step.target, atoms)
            if step.is_collective:
                node.meta.update(cause=cause.text, source=cause.source, bytes=step.bytes)
            shape = node.meta["val"].shape
        node = self.reshape(node, shape, self.local(result).shape)
        self.nodes[result] = node
        if node is not self.nodes[value]:
            node.meta["spec"] = self.plan.layout(result)

    def reshape(self, node: fx.Node, shape: tuple[int, ...], wanted: tuple[int, ...]) -> fx.Node:
        if shape == wanted:
            return node
        view = self.call(RESHAPE, (node, list(wanted)), {})
        view.meta.update(val=TensorMeta(wanted, node.meta["val"].dtype))
        if "spec" in node.meta:
            view.meta["spec"] = node.meta["spec"]
        return view

    def inline_local_implementation(self, operation: Operation) -> None:
        found = self.body(operation)
        assert found is not None
        body, axes = found
        unsharded = lambda value: TensorMeta(  # noqa: E731
            self.plan.layout(value).without(axes).shape(self.coordinate), value.meta.dtype
        )
        rule = find_rule(operation.op, self.rules)
        size_argument = None if rule is None else rule.size_argument
        use = LocalCall.of(body, axes, operation, self.plan.mesh, self.local, unsharded, size_argument)
        module = trace_local_call(use)
        mapping: dict[fx.Node, Any] = {}
        operands = iter(dict.fromkeys(operation.operands))
        for node in module.graph.nodes:
            if node.op == "placeholder":
                mapping[node] = self.nodes[next(operands)]
            elif node.op == "get_attr":
                mapping[node] = self.constant(
                    f"{operator_name(operation.op)}{node.target}", getattr(module, node.target)
                )
                mapping[node].meta["val"] = TensorMeta.of(getattr(module, node.target))
            elif node.op == "call_function" and (node.users or is_primitive(node)):
                mapping[node] = self.copy_from_body(node, mapping, operation)
            elif node.op == "output":
                results = node.args[0]
        for value, result in zip(operation.results, results, strict=True):
            if value is not None and result is not None:  # torch's meta kernels return gradients not asked for
                self.nodes[value] = mapping[result]
                if result.op == "call_function":
                    mapping[result].meta["spec"] = self.plan.layout(value)

    def copy_from_body(self, node: fx.Node, mapping: Mapping[fx.Node, Any], operation: Operation) -> fx.Node:
        name = f"{operator_name(node.target)}_1" if isinstance(node.target, torch._ops.OpOverload) else node.name
        copy = self.graph.create_node(
            "call_function",
            RESHAPE if node.target in _VIEWS else node.target,
            fx.map_arg(node.args, mapping.__getitem__),
            fx.map_arg(node.kwargs, mapping.__getitem__),
            name=name,
        )
        copy.meta["val"] = map_leaves(lambda t: None if t is None else TensorMeta.of(t), _plain(node.meta["val"]))
        copy.meta["source"] = operation.source
        if node.target in COLLECTIVES:
            arguments: tuple[Any, ...] = copy.args
            operand, *rest, axes = arguments
            kind, counts = COLLECTIVES[node.target], tuple(map(self.plan.mesh.axis_size, axes))  # type: ignore[index]
            held = operand.meta["val"]
            copy.meta["bytes"] = max_bytes_sent(kind, counts, held.shape, held.dtype.itemsize, rest)
            copy.meta["cause"] = f"{operator_name(operation.op)} over a sharded dim"
        return copy


def _identifier(path: str) -> str:
    """A Python identifier from a path: `params_w` from `params['w']`."""
    name = re.sub(r"\W+", "_", path).strip("_")
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"arg_{name}"


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (tuple, list)) else value


def _returns_one_tensor(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch._C.TensorType)
