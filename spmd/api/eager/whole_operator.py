"""Operators that have no program, as their results depend on values: each rank computes them of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch

from spmd.api.eager.operator_program import OperatorCall
from spmd.api.values.dtensor import DTensor, wrap
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import ShardingError
from spmd.ir.graph import map_leaves
from spmd.runtime.torch_settings import isolated
from spmd.tracing.source import where
from spmd.tracing.trace import strides_of


class WholeOperator:
    """An operator on replicated operands, whose results are replicated.

    Args:
        call: the call.

    Raises:
        ShardingError: the operator writes to a DTensor.
    """

    kernel = None

    def __init__(self, call: OperatorCall) -> None:
        if call.written:
            raise ShardingError(
                f"{call.op} at {where()} writes to a DTensor a result that depends on values, and may have another "
                "shape. Take the result of the operator without out= or `_`."
            )
        self.call, self.is_compared = call, all(spec.is_replicated for spec in call.specs)

    def __call__(self, held: Sequence[DTensor], args: Any, kwargs: Mapping[str, Any] | None, **_: object) -> Any:
        """Run it; the arguments are those of `Operator`."""
        mesh = self.call.specs[0].mesh
        count = len(mesh.held_coordinates)

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            (shard, *_) = leaf._move(str(self.call.op), DTensorSpec.replicated(mesh, leaf._spec.meta))
            return shard

        def replicated(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return wrap(DTensorSpec.replicated(mesh, TensorMeta.of(leaf)), (leaf,) * count, strides_of(leaf))

        given, named = map_leaves(whole, (tuple(args), dict(kwargs or {})))
        with isolated():
            return optree.tree_map(replicated, self.call.op(*given, **named))
