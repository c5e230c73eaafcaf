"""Where a rank's program makes tensors: on the mesh's device, which canonical operations do not name."""

from __future__ import annotations

import attrs
import torch

from spmd.ir.graph import Graph, Operation


def on_device(graph: Graph, device: torch.device) -> Graph:
    """A program whose factories make their tensors on a device, where its constants are, too.

    So nothing is copied from the host when it runs, and no operator meets tensors of two devices.
    """
    if device.type == "cpu":
        return graph
    return attrs.evolve(
        graph,
        constants=tuple((value, tensor.to(device)) for value, tensor in graph.constants),
        operations=tuple(_on_device(operation, device) for operation in graph.operations),
    )


def _on_device(operation: Operation, device: torch.device) -> Operation:
    if operation.operands or not isinstance(operation.op, torch._ops.OpOverload):
        return operation
    if all(parameter.name != "device" for parameter in operation.op._schema.arguments):
        return operation
    return attrs.evolve(operation, kwargs={**operation.kwargs, "device": device})
