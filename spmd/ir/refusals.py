"""Operators that refuse positions out of range: an unused result of one is no reason to leave its error out."""

from __future__ import annotations

from typing import Any

import torch

_NAMES = """
    embedding _embedding_bag _embedding_bag_forward_only gather index index_add index_copy index_fill index_put
    index_reduce index_select max_unpool2d max_unpool3d multi_margin_loss multilabel_margin_loss_forward
    nll_loss_forward nll_loss2d_forward put scatter scatter_add scatter_reduce take
"""
_REFUSING = frozenset(getattr(torch.ops.aten, name) for name in _NAMES.split())


def refuses_positions(op: Any) -> bool:
    """Test for an operator that raises an error for some values of its positions.

    >>> refuses_positions(torch.ops.aten.embedding.default), refuses_positions(torch.ops.aten.neg.default)
    (True, False)
    """
    return isinstance(op, torch._ops.OpOverload) and op.overloadpacket in _REFUSING
