"""`stack_layers`: the parameters of equal layers, as rows for `scan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from spmd.core.pytree import flatten_with_paths, structure_text, tree_flatten
from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.job.tracebacks import hides_internals
from spmd.tracing.source import where

_Layer = TypeVar("_Layer")


@hides_internals
def stack_layers(layers: Sequence[_Layer]) -> _Layer:
    """Stack the parameters of equal layers, so that `scan` loops over them: a program holds one layer for all.

    Args:
        layers: pytrees of tensors of equal structures, shapes and dtypes; one layer or more.

    Returns:
        One such pytree, whose tensors have the layers in dim 0. The spec of a tensor is that of a layer after None:
        `P(None, *spec.dims)`.

    Raises:
        TraceError: there is no layer, a leaf is no tensor, or layers differ.

    >>> import torch
    >>> layers = [{"weight": torch.eye(2) * n} for n in range(1, 4)]
    >>> from spmd import scan
    >>> scan(lambda x, layer: (layer["weight"] @ x, None), torch.ones(2), stack_layers(layers))[0]
    tensor([6., 6.])
    """
    call = f"spmd.stack_layers at {where()}"
    if not layers:
        raise TraceError(f"{call} needs one layer or more (got none).")
    paths, first, structure = flatten_with_paths(layers[0])
    columns: list[list[Tensor]] = [[] for _ in first]
    for number, layer in enumerate(layers):
        leaves, found = tree_flatten(layer)
        if found != structure:
            raise TraceError(
                f"{call}: layer {number} has another structure than layer 0: {structure_text(layer)}, and "
                f"{structure_text(layers[0])}. Stack layers that are alike."
            )
        for path, leaf, like, column in zip(paths, leaves, first, columns, strict=True):
            got = TensorMeta.of(leaf) if isinstance(leaf, Tensor) else f"{type(leaf).__name__} {leaf!r:.60}"
            if not isinstance(leaf, Tensor) or got != TensorMeta.of(like):
                wanted = TensorMeta.of(like) if isinstance(like, Tensor) else "a tensor"
                raise TraceError(
                    f"{call}: {path or 'the leaf'} of layer {number} is {got}, and must be {wanted}, as in layer 0. "
                    "Stack layers that are alike."
                )
            column.append(leaf)
    stacked: _Layer = structure.unflatten([torch.stack(column) for column in columns])
    return stacked
