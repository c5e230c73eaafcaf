"""Matrix factorizations and solvers, and Fourier transforms: each matrix of a batch, and each line, on its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
import torch

from spmd.rules.builders import along, batched, pointwise, rule, vanish
from spmd.rules.partial import carry, linear
from spmd.rules.rule import Call, Factors, Rule

aten = torch.ops.aten

_MATRIX = batched("2", "2")
_FACTORS = batched("2", "2 2 2")
_FFT = along(linear("self"), empty=vanish)


def _solve(call: Call) -> Factors:
    """The right-hand side is a batch of vectors where it lacks one dim of the matrices."""
    vectors = call.operands[1].ndim == 1 or call.operands[1].shape == call.operands[0].shape[:-1]
    return (batched("2 1", "1 2 1 0") if vectors else batched("2 2", "2 2 1 0")).factorize(call)


def _cross(call: Call) -> Factors:
    found = pointwise().factorize(call)
    return attrs.evolve(found, replicate=frozenset({f"d{call.argument('dim') % call.results[0].ndim}"}))


LINALG: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.cholesky.default: _MATRIX,
        aten.cholesky_inverse.default: _MATRIX,
        aten.cholesky_solve.default: batched("2 2", "2", linear("self")),
        aten.linalg_cholesky_ex.default: batched("2", "2 0"),
        aten.linalg_inv_ex.default: batched("2", "2 0"),
        aten.linalg_pinv.atol_rtol_tensor: batched("2 0 0", "2"),
        aten.linalg_matrix_exp.default: _MATRIX,
        aten._linalg_det.default: batched("2", "0 2 1"),
        aten._linalg_slogdet.default: batched("2", "0 0 2 1"),
        aten._linalg_eigh.default: batched("2", "1 2"),
        aten._linalg_eigvals.default: batched("2", "1"),
        aten.linalg_eig.default: batched("2", "1 2"),
        aten._linalg_svd.default: batched("2", "2 1 2"),
        aten.linalg_qr.default: batched("2", "2 2"),
        aten.geqrf.default: batched("2", "2 1"),
        aten.linalg_householder_product.default: batched("2 1", "2"),
        aten.ormqr.default: batched("2 1 2", "2", linear("input3")),
        aten.linalg_lu.default: _FACTORS,
        aten.linalg_lu_factor_ex.default: batched("2", "2 1 0"),
        aten.lu_unpack.default: batched("2 1", "2 2 2"),
        aten.linalg_lu_solve.default: batched("2 1 2", "2", linear("B")),
        aten.linalg_ldl_factor_ex.default: batched("2", "2 1 0"),
        aten.linalg_ldl_solve.default: batched("2 1 2", "2", linear("B")),
        aten._linalg_solve_ex.default: rule(_solve, linear("B:0")),
        aten.linalg_solve_triangular.default: batched("2 2", "2", linear("B")),
        aten.triangular_solve.default: batched("2 2", "2 2", linear("self:0")),
        aten.linalg_lstsq.default: batched("2 2", "2 1 0 1"),
        aten.linalg_cross.default: rule(_cross, linear("self", "other")),
        aten._cdist_forward.default: batched("2 2", "2"),
        aten._cdist_backward.default: batched("2 2 2 2", "2", linear("grad")),
        aten._fft_c2c.default: _FFT,
        aten._fft_r2c.default: _FFT,
        aten._fft_c2r.default: _FFT,
        aten.view_as_real.default: batched("0", "1", carry("self")),
        aten.view_as_complex.default: batched("1", "0", carry("self")),
        aten.complex.default: batched("0 0", "0", linear("real imag")),
        aten.polar.default: batched("0 0", "0", linear("abs")),
    }
)
