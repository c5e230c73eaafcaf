"""The number of floating-point operations of operator calls, for the operators that may be compute-bound.

torch's `torch.utils.flop_counter` has formulas for matrix products, convolutions and fused attention. This module adds
matrix-vector products, factorizations and solvers, Fourier transforms, distances and causal masks. A product and a sum
are two operations. Sorts, scans, reductions, softmax, normalisation, pooling, indexing, losses and optimizers have no
formula: they do a few operations per element and are memory-bound on every processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from spmd.core.spec import TensorMeta
from spmd.ir.call import Call
from spmd.ir.graph import Operation, Value, map_leaves

Formula: TypeAlias = Callable[[Call], float]


def flops(operation: Operation) -> float:
    """Real floating-point operations of the unsharded operation; 0 if its operator has no formula."""
    if not has_formula(operation.op) or not operation.tensors:
        return 0.0
    result = operation.tensors[0]
    if result not in _known:
        _known[result] = count_flops(operation.call())
    return _known[result]


_known: WeakKeyDictionary[Value, float] = WeakKeyDictionary()
"""A cache of counts by the first result of the operation: planning replaces operands by others of the same shape, but
not the results."""


def has_formula(op: torch._ops.OpOverload) -> bool:
    """Whether there is a formula for the floating-point operations of an operator."""
    return op._schema.name in FORMULAS or op.overloadpacket in flop_registry


def count_flops(call: Call) -> float:
    """Real floating-point operations of a call; its operator must have a formula.

    A complex product and sum are eight real operations, four times as many as for real numbers.
    """
    formula = FORMULAS.get(call.op._schema.name, _torch_count)
    complex_products = call.operands[0].dtype.is_complex and formula is not _fourier
    return float(formula(call) * (4 if complex_products else 1))


def arithmetic_dtype(operation: Operation) -> torch.dtype | None:
    """The dtype that an operation computes in: that of its first tensor operand; None if it has none."""
    return operation.operands[0].meta.dtype if operation.operands else None


def _torch_count(call: Call) -> float:
    """The count of torch's own formula, on meta tensors."""
    results = [_meta_tensor(result) for result in call.results]
    args, kwargs = map_leaves(_meta_tensor, (call.args, dict(call.kwargs)))
    formula: Any = flop_registry[call.op.overloadpacket]
    return float(formula(*args, **kwargs, out_val=results if len(results) > 1 else results[0]))


def _meta_tensor(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, TensorMeta) else leaf


def _shape(call: Call, name: str) -> tuple[int, ...]:
    return call.argument(name).shape  # type: ignore[no-any-return]


def _inner_products(matrix: str) -> Formula:
    """A formula in which every element of the operand `matrix` takes part in one product and one sum."""
    return lambda call: 2 * math.prod(_shape(call, matrix))


def _batched_product(call: Call) -> float:
    return 2 * math.prod(_shape(call, "batch1")) * _shape(call, "batch2")[-1]


def _trilinear(call: Call) -> float:
    """Two products and a sum for every index of the three operands together."""
    shapes = []
    for number in "123":
        shape = list(_shape(call, f"i{number}"))
        for dim in call.argument(f"expand{number}"):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 3 * math.prod(torch.broadcast_shapes(*shapes))


def _convolution_backward(call: Call) -> float:
    """The count of the forward, for each of the gradients of input and weight that is computed.

    torch's own formula ignores groups.
    """
    x, weight, grad = (list(_shape(call, name)) for name in ("input", "weight", "grad_output"))
    forward = conv_flop_count(x, weight, grad, call.argument("transposed"))
    return sum(call.argument("output_mask")[:2]) * forward


def _grouped_product(call: Call) -> float:
    """A product and a sum for each row and column of each group's result; columns of one group have one of its rows."""
    left, right = _shape(call, "self"), _shape(call, "mat2")
    return 2 * math.prod(left[-2:] if len(right) == 2 else left) * right[-1]


def _scaled_product(call: Call) -> float:
    return 2 * math.prod(_shape(call, "self")) * _shape(call, "mat2")[-1]


def _attention(call: Call) -> float:
    return sdpa_flop_count(*_every_head(call)) * _attended(call)


def _attention_backward(call: Call) -> float:
    """The scores are recomputed, and each of the two products of the forward has two products in the backward."""
    return sdpa_backward_flop_count(call.operands[0].shape, *_every_head(call)) * _attended(call)


def _every_head(call: Call) -> list[tuple[int, ...]]:
    """The shapes of query, key and value, all with the heads of the query.

    torch 2.11's formulas do not support grouped-query attention.
    """
    batch_and_heads = _shape(call, "query")[:2]
    return [(*batch_and_heads, *_shape(call, name)[2:]) for name in ("query", "key", "value")]


def _attention_of_tokens(call: Call) -> float:
    """Heads follow tokens, with or without a batch dim before these: `[batch, tokens, heads, channels]`.

    torch's own formulas are for heads before tokens.
    """
    query, key, value = (_shape(call, name) for name in ("query", "key", "value"))
    return 2 * math.prod(query[:-1]) * key[-3] * (query[-1] + value[-1])


def _logits(call: Call) -> float:
    """The product of a batch and the weights of a linear layer, which are the first two operands."""
    return 2 * math.prod(call.operands[0].shape) * call.operands[1].shape[0]


def _chunked_cross_entropy(call: Call) -> float:
    """The logits, and as much for each of the gradients of batch and weights that is computed."""
    return _logits(call) * (1 + sum(call.argument(f"compute_{name}_grad") for name in ("input", "linear_weight")))


def _attended(call: Call) -> float:
    """The fraction of pairs of query and key that is not masked: (n + 1) / 2n for n queries and n keys if causal."""
    queries, keys = _shape(call, "query")[-2], _shape(call, "key")[-2]
    if not call.argument("is_causal") or not queries * keys:
        return 1.0
    corner = min(queries, keys)
    return (corner * (corner + 1) / 2 + (queries - corner) * keys) / (queries * keys)


def _distances(call: Call) -> float:
    """A difference, a power and a sum per coordinate of every pair of points from two sets; as many in the backward."""
    distances = call.results[0] if call.op._schema.name == "aten::_cdist_forward" else call.argument("cdist")
    return 3.0 * distances.numel * _shape(call, "x1")[-1]


def _own_pairs(call: Call) -> float:
    """The count of `_distances` for every pair of points from one set."""
    points, coordinates = _shape(call, "self")
    return 3 * coordinates * points * (points - 1) / 2


def _matrices(name: str, formula: Callable[[int, int, Call], float]) -> Formula:
    """The formula for the batch of matrices in the argument `name`; `formula` counts one, from its rows and columns."""

    def count(call: Call) -> float:
        *batch, rows, columns = _shape(call, name)
        return math.prod(batch) * formula(rows, columns, call) if rows * columns else 0.0

    return count


def _squares(name: str, factor: float) -> Formula:
    """A formula of `factor * n**3` operations for square matrices of order n."""
    return _matrices(name, lambda n, _, call: factor * n**3)


def _solution(matrix: str, factor: float) -> Formula:
    """A formula of `factor` times n operations for each element of the solution, for a matrix of n columns."""
    return lambda call: factor * _shape(call, matrix)[-1] * call.results[0].numel


def _lu(rows: int, columns: int, call: Call | None = None) -> float:
    short, long = sorted((rows, columns))
    return short**2 * (long - short / 3)


def _qr(rows: int, columns: int, call: Call | None = None) -> float:
    """The triangular factor by Householder reflections, without forming Q."""
    return 2 * _lu(rows, columns)


def _explicit_q(rows: int, columns: int, reflectors: int) -> float:
    return 4 * rows * columns * reflectors - 2 * (rows + columns) * reflectors**2 + 4 / 3 * reflectors**3


def _apply_q(rows: int, reflectors: int, columns: float) -> float:
    """The product of Householder reflectors, each of `rows` elements, and a matrix of `columns` columns."""
    return 2 * columns * reflectors * (2 * rows - reflectors)


def _full_qr(rows: int, columns: int, call: Call) -> float:
    mode, short = call.argument("mode"), min(rows, columns)
    width = {"r": 0, "reduced": short, "complete": rows}[mode]
    return _qr(rows, columns) + (_explicit_q(rows, width, short) if width else 0)


def _singular_values(rows: int, columns: int, vectors: bool, full: bool) -> float:
    """The count by way of a QR factorization first, which is cheaper for tall matrices."""
    short, long = sorted((rows, columns))
    if not vectors:
        return 2 * long * short**2 + 2 * short**3
    return 4 * long**2 * short + 22 * short**3 if full else 6 * long * short**2 + 20 * short**3


def _svd(rows: int, columns: int, call: Call) -> float:
    return _singular_values(rows, columns, call.argument("compute_uv"), call.argument("full_matrices"))


def _pinv(rows: int, columns: int, call: Call) -> float:
    factors = 9 * rows**3 if call.argument("hermitian") else _singular_values(rows, columns, True, False)
    return factors + 2 * rows * columns * min(rows, columns)


def _least_squares(rows: int, columns: int, call: Call) -> float:
    short, right = min(rows, columns), call.results[0].numel * rows / call.operands[0].numel
    return _qr(rows, columns) + _apply_q(max(rows, columns), short, right) + short**2 * right


def _reflect(call: Call) -> float:
    *batch, rows, columns = _shape(call, "input3")
    if not call.argument("left"):
        rows, columns = columns, rows
    return math.prod(batch) * _apply_q(rows, _shape(call, "input2")[-1], columns)


def _fourier(call: Call) -> float:
    """5 n log2 n for each complex transform of n points, half of that if input or output is real.

    The n of a transform over several dims is the product of their lengths.
    """
    source, result = call.operands[0], call.results[0]
    meta = source if source.numel >= result.numel else result  # the real side, if one is real: it is the larger
    points = math.prod(meta.shape[dim] for dim in call.argument("dim"))
    factor = 5 if source.dtype.is_complex and result.dtype.is_complex else 2.5
    return factor * math.prod(meta.shape) * math.log2(max(points, 1))


def _table(rows: Mapping[str, Formula]) -> dict[str, Formula]:
    named = {name: formula for names, formula in rows.items() for name in names.split()}
    return {name if "::" in name else f"aten::{name}": formula for name, formula in named.items()}


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
            "fused_attention_overrideable")  # fmt: skip

_PRODUCTS = _table({
    "mv dot vdot": _inner_products("self"),
    "addmv": _inner_products("mat"),
    "addbmm": _batched_product,
    "_scaled_mm_v2": _scaled_product,
    "_grouped_mm": _grouped_product,
    "_trilinear": _trilinear,
    "convolution_backward": _convolution_backward,
    " ".join(f"_scaled_dot_product_{kernel}" for kernel in _KERNELS): _attention,
    " ".join(f"_scaled_dot_product_{kernel}_backward" for kernel in _KERNELS): _attention_backward,
    "_flash_attention_forward _efficient_attention_forward": _attention_of_tokens,
    "_flash_attention_backward _efficient_attention_backward": lambda call: 2.5 * _attention_of_tokens(call),
    "torch_nn::_linear_cross_entropy_batch_chunked": _chunked_cross_entropy,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": _logits,
    "_cdist_forward _cdist_backward": _distances,
    "_pdist_forward": _own_pairs,
    "_pdist_backward": lambda call: 2 * _own_pairs(call),  # each pair adds to both of its points
    "_fft_c2c _fft_r2c _fft_c2r": _fourier,
})  # fmt: skip

_FACTORIZATIONS = _table({
    "cholesky linalg_cholesky_ex linalg_ldl_factor_ex": _squares("self", 1 / 3),
    "linalg_lu linalg_lu_factor_ex _linalg_det _linalg_slogdet": _matrices("A", _lu),
    "geqrf": _matrices("self", _qr),
    "linalg_qr": _matrices("A", _full_qr),
    "linalg_householder_product": _matrices("input", lambda m, n, call: _explicit_q(m, n, _shape(call, "tau")[-1])),
    "ormqr": _reflect,
    "_linalg_svd": _matrices("A", _svd),
    "_linalg_eigh": _matrices("A", lambda n, _, call: (9 if call.argument("compute_v") else 4 / 3) * n**3),
    "_linalg_eigvals": _squares("self", 10),
    "linalg_eig": _squares("self", 25),
    "linalg_matrix_exp": _squares("self", 10),  # five products; squarings depend on the values: not counted
})  # fmt: skip

_SOLVERS = _table({
    "linalg_inv_ex": _squares("A", 2),
    "cholesky_inverse": _squares("self", 2 / 3),
    "linalg_pinv": _matrices("self", _pinv),
    "_linalg_solve_ex": lambda call: _matrices("A", _lu)(call) + _solution("A", 2)(call),
    "linalg_lu_solve": _solution("LU", 2),
    "linalg_ldl_solve": _solution("LD", 2),
    "cholesky_solve": _solution("input2", 2),
    "linalg_solve_triangular": _solution("self", 1),
    "triangular_solve": _solution("A", 1),
    "linalg_lstsq": _matrices("self", _least_squares),
})  # fmt: skip

FORMULAS: Mapping[str, Formula] = MappingProxyType({**_PRODUCTS, **_FACTORIZATIONS, **_SOLVERS})
"""Formulas that torch's registry lacks or that replace its own, by the operator's schema name (`aten::mv`).

Sources: the leading terms of the counts in Golub and Van Loan, "Matrix Computations" (3rd edition, 1996): Cholesky 4.2,
LU 3.2, QR 5.2, SVD 5.4.5, symmetric eigenvalues 8.3, other eigenvalues 7.5. LAPACK Working Note 41 for inverses and for
applying or forming Q. Bader, Blanes and Casas (2019) for the matrix exponential. Fourier transforms as in benchFFT.
"""
