"""The values of what does not depend on the inputs of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmd.ir.graph import Operation, Value, iterate_leaves, map_leaves
from spmd.ir.number import Number

_PURE = ("aten", "prims")


def evaluated(
    value: Value, operations: Sequence[Operation], constants: Mapping[Value, torch.Tensor]
) -> torch.Tensor | None:
    """The value of a value, if it depends on constants only; None if on inputs, dynamic or random numbers."""
    needed, found = {value}, []
    for operation in reversed(operations):
        if needed.isdisjoint(operation.tensors):
            continue
        is_pure = operation.op.namespace in _PURE and not operation.is_random
        if not is_pure or any(isinstance(leaf, Number) for leaf in iterate_leaves(operation.args)):
            return None
        found.append(operation)
        needed.update(operation.operands)
    produced = {result for operation in found for result in operation.tensors}
    if not needed - produced <= constants.keys():
        return None
    known: dict[Any, Any] = {key: constants[key] for key in needed - produced}
    take = lambda leaf: known[leaf] if isinstance(leaf, Value) else leaf  # noqa: E731
    for operation in reversed(found):
        results = operation.op(*map_leaves(take, operation.args), **map_leaves(take, dict(operation.kwargs)))
        known.update(zip(operation.results, iterate_leaves(results), strict=True))
    return known[value]  # type: ignore[no-any-return]
