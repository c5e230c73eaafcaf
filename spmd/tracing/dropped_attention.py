"""Attention with dropout by keys: fused kernels draw inside, so its weights are a tensor of the program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd.core.quantity import size_text
from spmd.core.spec import TensorMeta
from spmd.tracing.source import user_source, warn_at

LARGE = 64 * 10**6
"""The bytes of the weights of all ranks above which there is a warning."""


def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """`scaled_dot_product_attention` without a fused kernel if it has dropout; else NotImplemented."""
    if not dropout_p:
        return NotImplemented
    weights = TensorMeta((*query.shape[:-1], key.shape[-2]), query.dtype)
    if weights.nbytes > LARGE:
        warn_at(
            f'Attention with dropout {dropout_p} under rng="counter" computes its weights {weights}, '
            f"{size_text(weights.nbytes)} on all ranks together, and a mask: fused kernels draw from a generator of "
            "their own. Without dropout_p it is fused.",
            user_source(),
        )
    op = torch.ops.aten._scaled_dot_product_attention_math
    return op(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
