"""Pads by zeros before a convolution or an average become its own padding: a padded image would have other shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.ir.graph import Graph, Operation, Value

aten = torch.ops.aten

_IMAGE = {
    aten.convolution.default: 0,
    aten.convolution_backward.default: 1,
    aten.avg_pool2d.default: 0,
    aten.avg_pool2d_backward.default: 1,
    aten.avg_pool3d.default: 0,
    aten.avg_pool3d_backward.default: 1,
}
"""The position of the image among the arguments of each operator."""


def join_pads(graph: Graph) -> Graph:
    """Make operators on images that are padded by zeros, equally before and after, pad the images themselves.

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
    if at is None or pad is None or pad.op is not aten.constant_pad_nd.default or operation.kwargs:
        return operation
    parameters = operation.op._schema.arguments
    given = [*operation.args, *(parameter.default_value for parameter in parameters[len(operation.args) :])]
    arguments = dict(zip((parameter.name for parameter in parameters), given, strict=True))
    padding = _padding(operation, arguments, pad)
    if padding is None:
        return operation
    (image, pads), results = pad.args[:2], operation.results
    if at and (gradient := results[0]) is not None:
        crops = [-amount for amount in pads]
        readers = graph.consumers.get(gradient, ())
        if gradient in graph.outputs or any(
            reader.op is not aten.constant_pad_nd.default or list(reader.args[1]) != crops for reader in readers
        ):
            return operation
        replaced[gradient] = Value(gradient.name, TensorMeta(image.meta.shape, image.meta.dtype))
        results = (replaced[gradient], *results[1:])
    arguments |= {parameters[at].name: image, "padding": padding}
    return attrs.evolve(operation, args=tuple(arguments.values()), results=results)


def _padding(operation: Operation, arguments: Mapping[str, Any], pad: Operation) -> list[int] | None:
    """The padding of the operation together with that of its image; None if it cannot have it."""
    image, pads = pad.args[:2]
    before, after = pads[::2], pads[1::2]
    space = int(operation.op.overloadpacket.__name__[8]) if "kernel_size" in arguments else image.meta.ndim - 2
    if before != after or min(pads) < 0 or len(before) > space or any(pad.args[2:]):
        return None
    every = lambda name: list(arguments[name]) * (space if len(arguments[name]) == 1 else 1)  # noqa: E731
    added = [*(0,) * (space - len(before)), *reversed(before)]
    padding = [old + new for old, new in zip(every("padding"), added, strict=True)]
    if "kernel_size" not in arguments:
        return None if arguments["transposed"] else padding
    if arguments["ceil_mode"] or not arguments["count_include_pad"]:
        return None
    # torch refuses a padding of more than half of the kernel, and an image that is smaller than it without padding
    kernel = zip(padding, every("kernel_size"), image.meta.shape[-space:], strict=True)
    return padding if all(2 * amount <= width <= size for amount, width, size in kernel) else None
