"""Decompositions and solvers of well-conditioned matrices."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operand, Operator

_SPD = "({x} @ {x}.mT / {n} + torch.eye({m}) * 2)"


def _matrix(d: Draw, ndim: tuple[int, int] = (2, 3)) -> Operand:
    return d.floats(ndim, nonempty=True)


def _definite(text: str) -> Operator:
    """An operator of a symmetric positive definite matrix, `a` in the text."""

    def operator(d: Draw) -> str:
        x = _matrix(d)
        m = x.shape[-2]
        made = _SPD.format(x=x, n=x.shape[-1], m=m)
        b = d.sized((*x.shape[:-1], None)) if "{b}" in text else ""
        # Distinct diagonal elements keep eigenvalues distinct.
        return text.format(a=f"({made} + torch.diag(torch.arange({m}) * 1.5))", b=b)

    return operator


def _tall(text: str) -> Operator:
    """An operator of a matrix of full rank, `a` in the text, with at least as many rows as columns."""

    def operator(d: Draw) -> str:
        x = d.floats(
            (2, 3), nonempty=True, where=lambda t: t.shape[-2] >= t.shape[-1], make=lambda: (4, d.integer(1, 4))
        )
        rows, columns = x.shape[-2:]
        # Signs depend on numbers below the diagonal, which must not be zero up to rounding.
        other = f"torch.eye({rows}, {columns}) * 4 + torch.arange({rows * columns}).view({rows}, {columns}).sin() * 0.3"
        return text.format(a=f"({x} + {other})")

    return operator


OPERATORS: Mapping[str, Operator] = {
    "solve": _definite("torch.linalg.solve({a}, {b})"),
    "inv": _definite("torch.linalg.inv({a})"),
    "inverse": _definite("{a}.inverse()"),
    "det": _definite("torch.linalg.det({a})"),
    "logdet": _definite("torch.logdet({a})"),
    "slogdet": _definite("torch.linalg.slogdet({a})"),
    "cholesky": _definite("torch.linalg.cholesky({a})"),
    "cholesky_upper": _definite("torch.linalg.cholesky({a}, upper=True)"),
    "cholesky_solve": _definite("torch.cholesky_solve({b}, torch.linalg.cholesky({a}))"),
    "cholesky_inverse": _definite("torch.cholesky_inverse(torch.linalg.cholesky({a}))"),
    "solve_triangular": _definite("torch.linalg.solve_triangular({a}.triu(), {b}, upper=True)"),
    "eigvalsh": _definite("torch.linalg.eigvalsh({a})"),
    "eigh": _definite("torch.linalg.eigh({a})[0]"),
    "lu_factor": _definite("torch.linalg.lu_factor({a})[0]"),
    "lu": _definite("torch.linalg.lu({a})[1]"),
    "matrix_exp": _definite("torch.linalg.matrix_exp({a} * 0.1)"),
    "pinv": _tall("torch.linalg.pinv({a})"),
    "qr": _tall("torch.linalg.qr({a})[1]"),
    "qr_q": _tall("torch.linalg.qr({a})[0]"),
    "svdvals": _tall("torch.linalg.svdvals({a})"),
    "matrix_norm": _tall("torch.linalg.matrix_norm({a})"),
    "matrix_norm_one": _tall("torch.linalg.matrix_norm({a}, 1)"),
    "nuclear_norm": _tall("torch.linalg.matrix_norm({a}, 'nuc')"),
    "eigvals": _definite("torch.linalg.eigvals({a}).abs().sort().values"),
}
