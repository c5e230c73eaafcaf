"""Small calls of every operator that has a rule: what the rules are proved on.

Lengths 2 to 7 over two and three shards give even, uneven and empty shards.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spmd.testing.rule_calls.attention import ATTENTION
from spmd.testing.rule_calls.counting import COUNTING
from spmd.testing.rule_calls.draws import Calls
from spmd.testing.rule_calls.embedding import EMBEDDING
from spmd.testing.rule_calls.factories import FACTORIES
from spmd.testing.rule_calls.indexing import INDEXING
from spmd.testing.rule_calls.linalg import LINALG
from spmd.testing.rule_calls.loss import LOSS
from spmd.testing.rule_calls.matmul import MATMUL
from spmd.testing.rule_calls.normalization import NORMALIZATION
from spmd.testing.rule_calls.order import ORDER
from spmd.testing.rule_calls.pointwise import POINTWISE
from spmd.testing.rule_calls.pooling import POOLING
from spmd.testing.rule_calls.reduction import REDUCTION
from spmd.testing.rule_calls.shape import SHAPE
from spmd.testing.rule_calls.spatial import SPATIAL

aten = torch.ops.aten

CALLS: Mapping[torch._ops.OpOverload, Calls] = {
    **POINTWISE,
    **MATMUL,
    **SHAPE,
    **FACTORIES,
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
}
"""For every operator of `RULES`, arguments and keyword arguments of some calls."""

ARBITRARY = frozenset({
    aten.empty.memory_format, aten.empty_permuted.default, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default,
})  # fmt: skip
"""Operators whose values mean nothing."""

UNSEARCHED = frozenset(
    {
        *NORMALIZATION,
        *ATTENTION,
        *EMBEDDING,
        aten.as_strided.default,
        aten.as_strided_scatter.default,
        aten.segment_reduce.default,
        aten._segment_reduce_backward.default,
        aten._histogramdd_from_bin_tensors.default,
        *LINALG,
        *POOLING,
        *SPATIAL,
        *(op for op in LOSS if "nll" in str(op)),
    }
)
"""Operators whose kernels do not check that shapes fit together, and read or write out of bounds where they do not."""

BY_CHANCE = "right by chance, for few values"

INCOMPLETE = {
    "max and min through a product with a tensor of known sign": (
        aten.mul.Tensor, aten.div.Tensor, aten.lerp.Scalar, aten.lerp.Tensor, aten.threshold_backward.default,
        aten.softplus_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default,
        aten.hardtanh_backward.default, aten.hardsigmoid_backward.default, aten.binary_cross_entropy.default,
    ),
    "max and min through powers, by their base": (
        aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor,
    ),
    "infinities absorb any sum": (aten.masked_fill.Scalar,),
    BY_CHANCE: (
        aten.minimum.default, aten.max.other, aten.min.other, aten._to_copy.default,
        aten.relu.default, aten.relu6.default, aten.sign.default, aten.sgn.default,
        aten.prod.default, aten.sum.default, aten.any.default, aten.any.dims, aten.all.default, aten.all.dims,
        aten.logsumexp.default, aten.linalg_vector_norm.default, aten.scatter.value, *ORDER,
        aten.scatter_reduce.two, aten.index_reduce.default,
        aten.scatter.reduce, aten.scatter.value_reduce, aten.searchsorted.Tensor, aten.searchsorted.Scalar,
        aten.histogram.bin_ct, aten.hardshrink_backward.default, aten.softshrink_backward.default,
        aten.index_add.default, aten.index_put.default, aten.scatter_add.default, aten.silu_backward.default,
        aten.median.default, aten.nanmedian.default,
    ),
    "operands whose values are ignored": (
        aten.copy.default, aten.fill.Tensor, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    ),
}  # fmt: skip
"""Operators of which some right rows are known to be missing, by reason."""
