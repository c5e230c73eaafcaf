"""A rank's program as a `torch.fx.GraphModule`, for tools of torch such as torch.compile."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from spmd.ir.graph import Graph, Value
from spmd.ir.host_functions import Handle


def fx_module(graph: Graph, name: str) -> fx.GraphModule:
    """The program as a module; the nodes of values have `meta["val"]`, a TensorMeta.

    Args:
        graph: a rank's program.
        name: the name of the module's class.
    """
    made, nodes, held = fx.Graph(), {}, []
    attributes = {value.name: tensor for value, tensor in graph.constants}

    def define(value: Value, node: fx.Node) -> None:
        nodes[value] = node
        node.meta["val"] = value.meta

    def argument(leaf: Any) -> Any:
        if isinstance(leaf, Handle):
            held.append(leaf.function)
            return int(leaf)  # the module's code has it as text
        return nodes[leaf] if isinstance(leaf, Value) else leaf

    for value in graph.inputs:
        define(value, made.placeholder(value.name))
    for value, _ in graph.constants:
        define(value, made.get_attr(value.name))
    for operation in graph.operations:
        args, kwargs = torch.fx.node.map_aggregate((operation.args, dict(operation.kwargs)), argument)
        label = operation.annotations.tuple_name or next(value.name for value in operation.tensors)
        node = made.create_node("call_function", operation.op, args, kwargs, name=label)
        for index, result in enumerate(operation.results):
            if result is not None and operation.returns_tuple:
                define(result, made.create_node("call_function", operator.getitem, (node, index), name=result.name))
            elif result is not None:
                define(result, node)
    made.output(tuple(nodes[value] for value in graph.outputs))
    module = fx.GraphModule(attributes, made, name)
    module.meta["host_functions"] = held  # keeps them alive
    return module
