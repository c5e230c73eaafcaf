"""Reasons why calls send more than twice the bound, where it is loose or no algorithm that sends less is known."""

from __future__ import annotations

import re

_MATRIX = "one matrix is factorized where all of it is"
_ONE_NUMBER = "the derivative of one number has rank 1, whatever is merged or exchanged to compute it"
_POSITIONS = "positions are data: that those of this call are on few ranks is not known to a plan"

REASONS: dict[str, str] = {
    r"ge|gt|le|lt": "a condition, one byte, says less of the numbers that are compared, of eight",
    r"nn\.functional\.(hinge|cosine)_embedding_loss": "of a target only a condition counts, a byte",
    r"heaviside": "a value counts only where the other operand is zero, at no point",
    r"_batch_norm_with_update|_native_batch_norm_legit|native_batch_norm|nn\.functional\.instance_norm": (
        "the results do not depend on the running statistics, which all ranks get: a number for each channel"
    ),
    r"(linalg\.)?(lu|lu_unpack|(lu|ldl)_factor(_ex)?|cond|svdvals|matrix_exp)|norm\.nuc": _MATRIX,
    r"linalg\.((ldl_|tensor)?solve.*|householder_product)": _MATRIX,
    r"dist|trapz|trapezoid|nn\.functional\.cosine_similarity": _ONE_NUMBER,
    r"nn\.functional\.((triplet_margin(_with_distance)?|multilabel_margin)_loss|linear_cross_entropy.*)": _ONE_NUMBER,
    r"gather|__getitem__|take_along_dim|scatter(_add|_reduce\..*)?|index_copy|index_put|masked_scatter": _POSITIONS,
    r"_unsafe_masked_index(_put_accumulate)?|_segment_reduce\..*": _POSITIONS,
    r"nn\.functional\.(max_unpool[23]d(\.grad)?|fractional_max_pool2d|embedding_bag|grid_sample)": _POSITIONS,
    r"max_pool2d_with_indices_backward": _POSITIONS,
    r"(max|min)\.reduction_(no|with)_dim|aminmax|norm\.inf|kthvalue|mode": (
        "the gradient is zero but at one of many places, which is not known to a plan"
    ),
    r"(masked\.|nn\.functional\.)?(log_)?softm(ax|in)(\.with_dtype)?": (
        "a maximum goes around before the sum, where the result needs one number of the others"
    ),
    r"__rmatmul__": "who has the vector does not have the matrix, and cannot send a sum",
    r"histogramdd": "a count changes at few points of an element",
    r"triu|masked_fill": "a gather sends what is zero, or filled, too",
    r"(masked\.)?(var|std)(_mean)?(\.unbiased)?": "a mean is merged before the squares of distances from it",
    r"torch\.ops\.aten\._safe_softmax\.default": "numbers that sum to one are one fewer than are sent",
}
"""By a pattern of names of entries, the reason."""


def reason_of(name: str) -> str:
    """The reason of an entry; empty if there is none."""
    return next((reason for pattern, reason in REASONS.items() if re.fullmatch(pattern, name)), "")
