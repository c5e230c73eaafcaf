"""Small calls of matrix factorizations, solvers and Fourier transforms, with batches of 5 and of 2 by 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

aten = torch.ops.aten
Calls: TypeAlias = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]

_generator = torch.Generator().manual_seed(2)


def f(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=dtype)


def call(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    return args, kwargs


def square(*batch: int) -> torch.Tensor:
    return f(*batch, 3, 3) + 4 * torch.eye(3, dtype=torch.float64)


def positive(*batch: int) -> torch.Tensor:
    factor = f(*batch, 3, 3)
    return factor @ factor.mT + torch.eye(3, dtype=torch.float64)


def triangular(*batch: int) -> torch.Tensor:
    return square(*batch).tril()


_BATCHES = ((5,), (2, 3))


def squares(*rest: Any) -> Calls:
    return [call(square(*batch), *rest) for batch in _BATCHES]


def positives(*rest: Any, **options: Any) -> Calls:
    return [call(positive(*batch), *rest, **options) for batch in _BATCHES]


def lu(*batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    factors, pivots, _ = aten.linalg_lu_factor_ex.default(square(*batch))
    return factors, pivots


def ldl(*batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    factors, pivots, _ = aten.linalg_ldl_factor_ex.default(positive(*batch))
    return factors, pivots


def reflectors(*batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(aten.geqrf.default(f(*batch, 4, 3)))


def transforms(dtype: torch.dtype, *rest: Any) -> Calls:
    return [
        call(f(5, 4, dtype=dtype), [1], *rest),
        call(f(4, 3, 4, dtype=dtype), [0, 2], *rest),
        call(f(2, 5, 3, 4, dtype=dtype), [2, 1, 3], *rest),
    ]


def distances() -> tuple[torch.Tensor, ...]:
    return f(5, 4, 3), f(5, 2, 3)


_x, _y = distances()

LINALG: Mapping[torch._ops.OpOverload, Calls] = {
    **({aten.cholesky.default: positives()} if hasattr(aten, "cholesky") else {}),  # not in torch 2.15
    aten.cholesky_inverse.default: [call(triangular(5))],
    aten.cholesky_solve.default: [call(f(5, 3, 2), triangular(5)), call(f(3, 2), triangular(4))],
    aten.linalg_cholesky_ex.default: positives(upper=True),
    aten.linalg_inv_ex.default: squares(),
    aten.linalg_pinv.atol_rtol_tensor: [call(square(5), atol=f().abs() / 9, rtol=f(5).abs() / 9), call(square(2, 3))],
    aten.linalg_matrix_exp.default: squares(),
    aten._linalg_det.default: squares(),
    aten._linalg_slogdet.default: squares(),
    aten._linalg_eigh.default: [*positives(), *positives("L", False)],
    aten._linalg_eigvals.default: squares(),
    aten.linalg_eig.default: squares(),
    aten._linalg_svd.default: [*squares(), *squares(False, False), call(f(5, 4, 2), True)],
    aten.linalg_qr.default: [*squares(), *squares("r"), call(f(5, 4, 2), "complete")],
    aten.geqrf.default: [call(f(5, 4, 3))],
    aten.linalg_householder_product.default: [call(*reflectors(5))],
    aten.ormqr.default: [call(*reflectors(5), f(5, 4, 2)), call(*reflectors(2, 3), f(2, 3, 5, 4), False, True)],
    aten.linalg_lu.default: squares(),
    aten.linalg_lu_factor_ex.default: squares(),
    aten.lu_unpack.default: [call(*lu(5)), call(*lu(2, 3), False), call(*lu(4), True, False)],
    aten.linalg_lu_solve.default: [call(*lu(5), f(5, 3, 2)), call(*lu(2, 3), f(3, 3, 2)), call(*lu(), f(4, 3, 2))],
    aten.linalg_ldl_factor_ex.default: positives(),
    aten.linalg_ldl_solve.default: [call(*ldl(5), f(5, 3, 2)), call(*ldl(2, 3), f(3, 3, 2))],
    aten._linalg_solve_ex.default: [
        call(square(5), f(5, 3, 2)),
        call(square(5), f(5, 3)),
        call(square(2, 3), f(2, 3, 3)),
        call(square(4), f(4, 2, 3), left=False),
        call(square(), f(3)),
    ],
    aten.linalg_solve_triangular.default: [
        call(triangular(5), f(5, 3, 2), upper=False),
        call(triangular(), f(4, 3, 2), upper=False),
        call(triangular(4), f(2, 3), upper=False, left=False),
    ],
    aten.triangular_solve.default: [call(f(5, 3, 2), triangular(5), False), call(f(3, 2), triangular(4), False)],
    aten.linalg_lstsq.default: [call(f(5, 4, 3), f(5, 4, 2))],
    aten.linalg_cross.default: [call(f(5, 3), f(5, 3)), call(f(3, 4), f(3, 1), dim=0)],
    aten._cdist_forward.default: [call(_x, _y, 2.0, None), call(f(4, 3), f(5, 3), 1.0, None)],
    aten._cdist_backward.default: [call(f(5, 4, 2), _x, _y, 2.0, torch.cdist(_x, _y))],
    aten._fft_c2c.default: transforms(torch.complex128, 0, True),
    aten._fft_r2c.default: transforms(torch.float64, 1, True),
    aten._fft_c2r.default: transforms(torch.complex128, 2, 6),
    aten.view_as_real.default: [call(f(4, 5, dtype=torch.complex128))],
    aten.view_as_complex.default: [call(f(4, 5, 2))],
    aten.complex.default: [call(f(4, 5), f(5)), call(f(4), f())],
    aten.polar.default: [call(f(4, 5), f(5))],
}
