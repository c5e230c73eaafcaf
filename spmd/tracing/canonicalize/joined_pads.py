"""Pads by zeros before a convolution become its own padding: a padded image would be cut into other shards."""

from __future__ import annotations

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.ir.graph import Graph, Operation, Value

aten = torch.ops.aten

_IMAGE = {aten.convolution.default: 0, aten.convolution_backward.default: 1}
"""The position of the image among the arguments of each operator."""


def join_pads(graph: Graph) -> Graph:
    """Make convolutions of images that are padded by zeros, equally before and after, pad the images themselves.

    So do their gradients where all that is read of the padded image's gradient is that of the image.
    """
    replaced: dict[Value, Value] = {}
    operations: list[Operation] = []
    for operation in graph.operations:
        if operation.op is not aten.constant_pad_nd.default or operation.args[0] not in replaced:
            operations.append(_joined(graph, operation, replaced))
        else:
            replaced[operation.tensors[0]] = replaced[operation.args[0]]
    return graph.substitute(replaced, tuple(operation.substitute(replaced) for operation in operations))


def _joined(graph: Graph, operation: Operation, replaced: dict[Value, Value]) -> Operation:
    """The operation on the image without pads; a gradient that changes its shape is noted, with what replaces it."""
    at = _IMAGE.get(operation.op)
    pad = None if at is None else graph.producers.get(operation.args[at])
    if at is None or pad is None or pad.op is not aten.constant_pad_nd.default or operation.args[at + 6]:
        return operation
    image, pads = pad.args[:2]
    before, after, space = pads[::2], pads[1::2], image.meta.ndim - 2
    if before != after or min(pads) < 0 or len(before) > space or any(pad.args[2:]):
        return operation
    results = operation.results
    if at and (gradient := results[0]) is not None:
        crops = [-amount for amount in pads]
        readers = graph.consumers.get(gradient, ())
        if gradient in graph.outputs or any(
            reader.op is not aten.constant_pad_nd.default or list(reader.args[1]) != crops for reader in readers
        ):
            return operation
        replaced[gradient] = Value(gradient.name, TensorMeta(image.meta.shape, image.meta.dtype))
        results = (replaced[gradient], *results[1:])
    added = [*(0,) * (space - len(before)), *reversed(before)]
    own = operation.args[at + 4]
    padding = [old + new for old, new in zip([*own] * (space if len(own) == 1 else 1), added, strict=True)]
    args = (*operation.args[:at], image, *operation.args[at + 1 : at + 4], padding, *operation.args[at + 5 :])
    return attrs.evolve(operation, args=args, results=results)
