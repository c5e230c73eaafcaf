"""Matrix factorizations and solvers: independent for each matrix of a batch."""

from __future__ import annotations

import attrs

from spmd.ir.call import Call
from spmd.rules.builders import batched, empty_results, pointwise, rule
from spmd.rules.notation import Rows, by_call, factors
from spmd.rules.partial import carry, increasing, linear
from spmd.rules.rule import Factors, Rule, table


def _solver(pattern: str, *rows: Rows) -> Rule:
    """The rule of a solver: independent for each matrix of a batch, and each column `c` of the right-hand side.

    If the call's argument `left` is False, the unknowns are left of the matrix, and `c` are rows.
    """

    def choose(call: Call) -> Rule:
        left = call.argument("left", True)
        return factors(pattern if left else pattern.replace("_ c", "c _"), *rows, independent="c")

    return by_call(choose, empty=empty_results)


_VECTORS = batched("2 1", "1 2 1 0", linear("B:0"))
_COLUMNS = _solver("... _ _, ... _ c -> ... _ c, ... _ _, ... _, ...", linear("B:0"))


def _solve(call: Call) -> Rule:
    """The right-hand side is a batch of vectors if it has one dim less than the matrices."""
    vectors = call.operands[1].ndim == 1 or call.operands[1].shape == call.operands[0].shape[:-1]
    return _VECTORS if vectors else _COLUMNS


def _cross(call: Call) -> Factors:
    found = pointwise().factorize(call)
    return attrs.evolve(found, replicate=frozenset({f"...{call.argument('dim') % call.results[0].ndim}"}))


LINALG = table({
    "cholesky? cholesky_inverse linalg_matrix_exp": batched("2", "2"),
    "cholesky_solve": _solver("... _ c, ... _ _ -> ... _ c", linear("self")),
    "linalg_cholesky_ex linalg_inv_ex": batched("2", "2 0"),
    "linalg_pinv.atol_rtol_tensor": batched("2 0 0", "2"),
    "_linalg_det": batched("2", "0 2 1"),
    "_linalg_slogdet": batched("2", "0 0 2 1"),
    "_linalg_eigh linalg_eig": batched("2", "1 2"),
    "_linalg_eigvals": batched("2", "1"),
    "_linalg_svd": batched("2", "2 1 2"),
    "linalg_qr": batched("2", "2 2"),
    "geqrf": batched("2", "2 1"),
    "linalg_householder_product": batched("2 1", "2"),
    "ormqr": _solver("... _ _, ... _, ... _ c -> ... _ c", linear("input3")),
    "linalg_lu": batched("2", "2 2 2"),
    "linalg_lu_factor_ex linalg_ldl_factor_ex": batched("2", "2 1 0"),
    "lu_unpack": batched("2 1", "2 2 2", increasing("LU_data:1 2")),
    "linalg_lu_solve linalg_ldl_solve": _solver("... _ _, ... _, ... _ c -> ... _ c", linear("B")),
    "_linalg_solve_ex": by_call(_solve, empty=empty_results),
    "linalg_solve_triangular": _solver("... _ _, ... _ c -> ... _ c", linear("B")),
    "triangular_solve": _solver("... _ c, ... _ _ -> ... _ c, ... _ _", linear("self:0")),
    "linalg_lstsq": batched("2 2", "2 1 0 1"),
    "linalg_cross": rule(_cross, linear("self", "other")),
    "_cdist_forward": factors("... p m, ... r m -> ... p r", replicate="m"),
    "_cdist_backward": factors("... p r, ... p m, ... r m, ... p r -> ... p m", linear("grad"), sum="r"),
    "view_as_real": batched("0", "1", carry("self")),
    "view_as_complex": batched("1", "0", carry("self")),
    "complex": batched("0 0", "0", linear("real imag")),
    "polar": batched("0 0", "0", linear("abs")),
})  # fmt: skip
