"""Rows that are correct and missing from the rules, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spmd.testing.rule_check import Finding

UNKNOWN = "not known"

KNOWN: Mapping[str, Mapping[str, str]] = {
    "few numbers: an operand of one or two elements, right for all that were tried": {
        "aten.copysign.Tensor": "R, max -> max; R, min -> min",
        "aten.fmax.default": "R, min -> min; max, max -> max; min, R -> min",
        "aten.fmin.default": "R, max -> max; max, R -> max; min, min -> min",
        "aten.heaviside.default": "R, max -> max; R, min -> min",
        "aten.histogram.bins_tensor": "R, max -> max, max; R, max -> sum, max; max, R -> max, R",
        "aten.igamma.default": "R, min -> min; min, R -> max",
        "aten.igammac.default": "R, min -> max; min, R -> min",
        "aten.logical_xor.default": "R, max -> R; R, min -> R; R, sum -> R",
        "aten.nextafter.default": "R, max -> R; R, min -> R; R, sum -> R",
        "aten.rsqrt.default": "min -> max",
        "aten.special_zeta.default": "sum, R -> R",
        "aten.special_xlog1py.default": "max, R -> max; min, R -> min",
    },
    "one element a line: the operator copies it, or gives its place": {
        "aten.max.dim": "max -> max, R; min -> min, R; sum -> sum, R",
        "aten.min.dim": "max -> max, R; min -> min, R; sum -> sum, R",
    },
    "the operator does not read these values, or not for these options": {
        "aten._pdist_backward.default": "R, R, max -> R; R, R, min -> R; R, R, sum -> R",
        "aten.fractional_max_pool2d.default": "R, max -> R, R; R, min -> R, R; R, sum -> R, R",
        "aten.fractional_max_pool3d.default": "R, max -> R, R; R, min -> R, R; R, sum -> R, R",
        "aten.hardshrink_backward.default": "R, max -> R; R, min -> R; R, sum -> R",
        "aten.nll_loss_forward.default": "R, R, sum -> R, sum",
    },
    "linear for these options, or in several operands at once": {
        "aten._cdist_backward.default": "R, sum, sum, R -> sum",
        "aten._pdist_backward.default": "R, sum, R -> sum",
        "aten._scaled_mm.default": "R, R, R, sum -> sum; R, R, R, sum, sum -> sum; "
        "R, R, sum, R -> sum; R, R, sum, R, sum -> sum",
        "aten._scaled_mm_v2.default": "R, R, R, sum -> sum; R, R, sum, R -> sum",
        "aten.grid_sampler_2d_backward.default": "R, sum, R -> R, sum; R, sum, R -> sum",
        "aten.grid_sampler_3d_backward.default": "R, sum, R -> R, sum; R, sum, R -> sum",
        "aten.hardshrink.default": "sum -> sum",
        "aten.masked_fill.Scalar": "sum, R -> sum",
        "aten.nan_to_num.default": "sum -> sum",
        "aten.native_batch_norm_backward.default": "R, sum, R, sum, R -> sum, R",
        "aten.native_layer_norm_backward.default": "R, sum, sum, R, R, min -> sum, R",
        "aten.resize.default": "sum -> sum",
        "aten.rrelu_with_noise_functional.default": "R, sum -> R, sum",
        "aten.segment_reduce.default": "sum, R -> sum",
        "aten.softshrink.default": "sum -> sum",
    },
    "monotone for these options, or for factors of known sign": {
        "aten._scaled_mm.default": "R, R, R, R, max -> max; R, R, R, R, min -> min",
        "aten._upsample_nearest_exact1d_backward.default": "max -> max; min -> min",
        "aten.acosh.default": "min -> min",
        "aten.binary_cross_entropy.default": "R, R, max -> max; R, R, min -> min",
        "aten.embedding_dense_backward.default": "max, R -> max; min, R -> min",
        "aten.index_add.default": "R, R, max -> max; R, R, min -> min",
        "aten.index_put.default": "R, R, max -> max; R, R, min -> min",
        "aten.index_reduce.default": "max, R, R -> max; min, R, R -> min",
        "aten.lerp.Scalar": "R, max -> max; R, min -> min",
        "aten.log.default": "min -> min",
        "aten.log10.default": "min -> min",
        "aten.log1p.default": "min -> min",
        "aten.log2.default": "min -> min",
        "aten.logit.default": "max -> max; min -> min",
        "aten.nan_to_num.default": "max -> max; min -> min",
        "aten.nll_loss_forward.default": "max, R, R -> min, R; min, R, R -> max, R",
        "aten.pow.Scalar": "max -> max; min -> min",
        "aten.pow.Tensor_Scalar": "min -> max",
        "aten.resize.default": "max -> max; min -> min",
        "aten.round.decimals": "max -> max; min -> min",
        "aten.rrelu_with_noise_functional.default": "R, max -> R, max; R, min -> R, min; "
        "max, R -> max, R; min, R -> min, R",
        "aten.scatter.value_reduce": "max, R -> max; min, R -> min",
        "aten.scatter_reduce.two": "max, R, R -> max; min, R, R -> min",
        "aten.segment_reduce.default": "max, R -> max",
        "aten.special_modified_bessel_k0.default": "min -> max",
        "aten.special_modified_bessel_k1.default": "min -> max",
        "aten.special_scaled_modified_bessel_k0.default": "min -> max",
        "aten.special_scaled_modified_bessel_k1.default": "min -> max",
        "aten.sqrt.default": "min -> min",
        "aten.threshold.default": "max -> max; min -> min",
        "aten.unfold_backward.default": "max -> max; min -> min",
        "aten.upsample_nearest1d_backward.default": "max -> max; min -> min",
    },
    "cuts that fit these lengths or options, and not others": {
        "aten._cdist_forward.default": "S1, S1 -> sum",
        "aten._histogramdd_from_bin_tensors.default": "S0, R, R -> max",
        "aten.max_unpool2d.default": "S3, S3 -> sum",
        "aten.nll_loss2d_forward.default": "S0, S0, R -> S0, R; S2, S1, R -> S1, R; S3, S2, R -> S2, R",
        "aten.nll_loss_forward.default": "S0, S0 -> S0, R; S0, S0, R -> S0, R",
    },
}  # fmt: skip
"""By reason and operator, the rows: the placements of the operands and of the results."""


def known_rows() -> Iterator[tuple[str, str, str]]:
    """The reason, operator and row of every known missing row."""
    for reason, ops in KNOWN.items():
        for op, rows in ops.items():
            yield from ((reason, op, row) for row in rows.split("; "))


def reason_of(op: str, finding: Finding) -> str:
    """Why a row is missing; `UNKNOWN` if `KNOWN` does not list it."""
    return next((reason for reason, name, row in known_rows() if (name, row) == (op, finding.row)), UNKNOWN)
