"""Small calls of every operator that has a rule, on which the rules are checked.

Lengths 2 to 7 over two and three shards give even, uneven and empty shards.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from proofs.rule_calls.attention import ATTENTION
from proofs.rule_calls.counting import COUNTING
from proofs.rule_calls.draws import Calls
from proofs.rule_calls.embedding import EMBEDDING
from proofs.rule_calls.factories import FACTORIES
from proofs.rule_calls.indexing import INDEXING
from proofs.rule_calls.keyed_draws import KEYED_DRAWS
from proofs.rule_calls.linalg import LINALG
from proofs.rule_calls.loss import LOSS
from proofs.rule_calls.matmul import MATMUL
from proofs.rule_calls.normalization import NORMALIZATION
from proofs.rule_calls.optimizers import OPTIMIZERS
from proofs.rule_calls.order import ORDER
from proofs.rule_calls.pointwise import POINTWISE
from proofs.rule_calls.pooling import POOLING
from proofs.rule_calls.reduction import REDUCTION
from proofs.rule_calls.shape import SHAPE
from proofs.rule_calls.spatial import SPATIAL

aten = torch.ops.aten

CALLS: Mapping[torch._ops.OpOverload, Calls] = {
    **POINTWISE,
    **MATMUL,
    **SHAPE,
    **FACTORIES,
    **KEYED_DRAWS,
    **REDUCTION,
    **NORMALIZATION,
    **ATTENTION,
    **EMBEDDING,
    **LOSS,
    **ORDER,
    **INDEXING,
    **COUNTING,
    **LINALG,
    **POOLING,
    **SPATIAL,
    **OPTIMIZERS,
}
"""For every operator of `RULES`, arguments and keyword arguments of some calls."""

ARBITRARY = frozenset({
    aten.empty.memory_format, aten.empty_permuted.default, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default,
})  # fmt: skip
"""Operators whose results are uninitialized memory."""

UNCHECKED = frozenset(
    {
        *NORMALIZATION,
        *ATTENTION,
        *EMBEDDING,
        *POOLING,
        *(op for op in SPATIAL if "convolution" not in str(op)),
        *(op for op in LOSS if "nll" in str(op)),
        aten.lu_unpack.default,
        aten.segment_reduce.default,
        aten._segment_reduce_backward.default,
        aten._histogramdd_from_bin_tensors.default,
        *OPTIMIZERS,
    }
)
"""Operators whose kernels do not check that shapes match, and read or write out of bounds if they do not."""

UNSEARCHED = frozenset(
    {
        *(op for op in POOLING if "max_pool" in str(op) and "backward" in str(op)),
        *(op for op in SPATIAL if "embedding_bag" in str(op) and "backward" in str(op)),
        aten.nll_loss_backward.default,
        aten.nll_loss2d_backward.default,
        aten._segment_reduce_backward.default,
        *(op for op in ATTENTION if "cpu" not in str(op)),
        *OPTIMIZERS,
    }
)
"""Operators of `UNCHECKED` on which missing rows are not searched for, since some placements are unsafe to run.

Their kernels write to positions given by an operand, or as many elements as another operand has. Attention of other
devices is among them, because its substitute kernels read other operands than the real ones.
"""
