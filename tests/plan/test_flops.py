"""Counts of arithmetic: torch's own where it counts, closed forms and sums over an algorithm's steps elsewhere."""

import math

import attrs
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, shape_wrapper

import spmd.rules as rules
from proofs.rule_calls import CALLS
from spmd.core.spec import TensorMeta
from spmd.ir.call import Call
from spmd.ir.graph import Operation, Value, iterate_leaves, map_leaves
from spmd.plan.cost.flops import count_flops, flops, has_formula
from spmd.rules import RULES
from spmd.rules.ops.loss import LAZILY_DEFINED

aten = torch.ops.aten

MEMORY_BOUND = (
    rules.VIEWS, rules.MOVES, rules.INDEXING, rules.FACTORIES, rules.RANDOM, rules.REDUCTION, rules.EXTREMES,
    rules.SCAN, rules.COUNTING, rules.SOFTMAX, rules.NORMALIZATION, rules.EMBEDDING, rules.LOSS, rules.CTC,
    rules.POOLING, rules.MANUAL, rules.OPTIMIZERS, rules.REGIONS, rules.KEYED_DRAWS,
)  # fmt: skip
"""Families of a few operations an element: sorts and top-k are among the moves, resampling is pooling."""

MEMORY_BOUND_AMONG_OTHERS = {
    "lu_unpack", "linalg_cross", "view_as_real", "view_as_complex", "complex", "polar", "_embedding_bag",
    "_embedding_bag_forward_only", "_embedding_bag_backward", "_embedding_bag_dense_backward",
    "_embedding_bag_per_sample_weights_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward",
}  # fmt: skip


def meta(*shape, dtype=torch.float64):
    return TensorMeta(shape, dtype)


def real_call(op, args, kwargs):
    """A call, and torch's count of its operations, from running it."""
    seen = lambda leaf: TensorMeta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
    with FlopCounterMode(display=False) as counter:
        result = op(*args, **kwargs)
    results = tuple(seen(leaf) for leaf in iterate_leaves(result) if isinstance(leaf, torch.Tensor))
    return Call(op, map_leaves(seen, tuple(args)), map_leaves(seen, dict(kwargs)), results), counter.get_total_flops()


def count(op, *args, results=(), **kwargs):
    return count_flops(Call(op, args, kwargs, results))


def refined(call):
    """Whether this counts what torch's formula does not see: a causal mask, groups."""
    names = {argument.name for argument in call.op._schema.arguments}
    causal = "is_causal" in names and call.argument("is_causal")
    return causal or (call.op is aten.convolution_backward.default and call.argument("groups") > 1)


@pytest.mark.parametrize("op", [op for op in CALLS if op.overloadpacket in flop_registry], ids=str)
def test_counts_are_torchs(op):
    compared = 0
    for args, kwargs in CALLS[op]:
        call, expected = real_call(op, args, kwargs)
        if not refined(call):
            assert expected == count_flops(call) > 0
            compared += 1
    assert compared


@pytest.mark.parametrize("op", [op for op in CALLS if has_formula(op)], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_every_formula_takes_real_calls(op):
    for args, kwargs in CALLS[op]:
        call, _ = real_call(op, args, kwargs)
        assert 0 < count_flops(call) < math.inf


def test_every_operator_is_counted_or_bound_by_memory():
    exempt = {op for family in MEMORY_BOUND for op in family} | {
        op for op in RULES if op.overloadpacket.__name__ in MEMORY_BOUND_AMONG_OTHERS
    }
    pointwise = {op for op in RULES if torch.Tag.pointwise in op.tags} | set(rules.POINTWISE)
    views = {op for op in RULES if any(argument.alias_info for argument in op._schema.arguments)}
    uncounted = {op for op in RULES if not has_formula(op)}
    assert not uncounted - exempt - pointwise - views
    assert not {op for op in exempt | pointwise if has_formula(op)}
    assert not MEMORY_BOUND_AMONG_OTHERS - {op.overloadpacket.__name__ for op in uncounted}


def test_operators_that_torch_defines_late_are_counted():
    pytest.importorskip("torch.nn.modules.linear_cross_entropy")  # it defines them
    scalar = torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default
    each = torch.ops.torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default
    assert set(LAZILY_DEFINED) == {scalar._schema.name, each._schema.name}
    x, weight, target = meta(6, 4), meta(5, 4), meta(6, dtype=torch.int64)
    forward = 2 * 6 * 5 * 4
    rest = (-100, 0.0, 2, "auto", torch.float32, False)
    assert forward == count(each, x, weight, target, None, None, -100, 2, "auto", torch.float32)
    assert 3 * forward == count(scalar, x, weight, target, None, None, "sum", *rest, True, True, False)
    assert forward == count(scalar, x, weight, target, None, None, "sum", *rest, False, False, False)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (3, 8), (8, 3), (64, 64)])
def test_a_causal_mask_leaves_the_pairs_below_it(queries, keys):
    q, k = meta(2, 3, queries, 8), meta(2, 3, keys, 8)
    kept = torch.ones(queries, keys).tril().sum().item() / (queries * keys)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert count(forward, q, k, k, 0.0, True) == pytest.approx(kept * count(forward, q, k, k, 0.0, False))
    assert 2 * 2 * 6 * queries * keys * 8 == count(forward, q, k, k, 0.0, False)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    args = (q, q, k, k, q, meta(2, queries, 3), 0.0)
    assert count(backward, *args, True) == pytest.approx(kept * count(backward, *args, False))
    assert 2.5 * count(forward, q, k, k) == count(backward, *args, False)


def test_heads_that_share_keys_count_each():
    op, queries, keys = aten._scaled_dot_product_flash_attention.default, meta(2, 6, 4, 8), meta(2, 3, 5, 8)
    assert (
        count(op, queries, meta(2, 6, 5, 8), meta(2, 6, 5, 8)) == count(op, queries, keys, keys) == 4 * 12 * 4 * 5 * 8
    )


def test_attention_of_tokens_counts_as_that_of_heads():
    q, k = meta(2, 4, 6, 8), meta(2, 5, 6, 8)
    queries, keys = meta(2, 6, 4, 8), meta(2, 6, 5, 8)
    wanted = count(aten._scaled_dot_product_flash_attention.default, queries, keys, keys)
    assert wanted == count(aten._flash_attention_forward.default, q, k, k, None, None, 4, 5, 0.0, False, False)
    assert wanted == count(aten._efficient_attention_forward.default, q, k, k, None, None, None, 4, 5, 0.0, 0)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradients_of_grouped_convolution_are_those_of_its_groups(transposed):
    def backward(groups, channels, mask):
        x, grad, weight = meta(2, channels, 7, 7), meta(2, channels, 7, 7), meta(channels, channels // groups, 3, 3)
        options = ([channels], [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups, mask)
        return count(aten.convolution_backward.default, grad, x, weight, *options)

    assert 4 * backward(1, 3, [True, True, True]) == backward(4, 12, [True, True, True])
    assert 2 * backward(4, 12, [True, False, True]) == backward(4, 12, [True, True, False])


def test_products_with_vectors_and_of_three():
    assert 2 * 3 * 5 == count(aten.mv.default, meta(3, 5), meta(5))
    assert 2 * 3 * 5 == count(aten.addmv.default, meta(3), meta(3, 5), meta(5))
    assert 2 * 5 == count(aten.dot.default, meta(5), meta(5))
    assert 7 * 2 * 3 * 4 * 5 == count(aten.addbmm.default, meta(3, 5), meta(7, 3, 4), meta(7, 4, 5))
    bilinear = (meta(6, 3), meta(5, 3, 4), meta(6, 4), [1, 3], [0], [1, 2], [2, 3])
    assert 3 * 6 * 5 * 3 * 4 == count(aten._trilinear.default, *bilinear)
    assert 3 * 4 * 5 * 7 == count(aten._cdist_forward.default, meta(4, 7), meta(5, 7), 2.0, None, results=(meta(4, 5),))
    assert 3 * 6 * 7 == count(aten._pdist_forward.default, meta(4, 7))


def test_complex_products_count_four_times():
    x = meta(6, 6, dtype=torch.complex64)
    assert 4 * 2 * 6**3 == count(aten.mm.default, x, x, results=(x,))
    assert 4 * 2 * 6**3 == count(aten.linalg_inv_ex.default, x)


def lu_steps(m, n):
    return sum((m - j - 1) * (1 + 2 * (n - j - 1)) for j in range(min(m, n)))


def householder_steps(m, n, reflectors):
    """Reflector j changes rows and columns from j on, by a product with a vector and an outer product."""
    return sum(4 * (m - j) * (n - j) for j in range(reflectors))


@pytest.mark.parametrize(("m", "n"), [(2000, 2000), (3000, 1000), (1000, 3000)])
def test_factorizations_count_the_steps_of_their_algorithms(m, n):
    a, k = meta(m, n), min(m, n)
    near = lambda steps: pytest.approx(steps, rel=5e-3)  # noqa: E731  (formulas are leading terms)
    assert count(aten.linalg_lu_factor_ex.default, a) == near(lu_steps(m, n))
    assert count(aten.geqrf.default, a) == near(householder_steps(m, n, k))
    assert count(aten.linalg_qr.default, a, "r") == count(aten.geqrf.default, a)
    thin, full = householder_steps(m, k, k), householder_steps(m, m, k)
    assert count(aten.linalg_qr.default, a, "reduced") == near(householder_steps(m, n, k) + thin)
    assert count(aten.linalg_qr.default, a, "complete") == near(householder_steps(m, n, k) + full)
    assert count(aten.linalg_householder_product.default, meta(m, k), meta(k)) == near(thin)
    applied = sum(4 * (m - j) * 50 for j in range(k))
    assert count(aten.ormqr.default, meta(m, k), meta(k), meta(m, 50)) == near(applied)
    assert count(aten.ormqr.default, meta(m, k), meta(k), meta(50, m), False) == near(applied)


N = 300
LU = 2 / 3 * N**3


@pytest.mark.parametrize(
    ("op", "args", "results", "expected"),
    [
        (aten.linalg_cholesky_ex.default, (meta(5, N, N),), (), 5 * N**3 / 3),
        (aten.linalg_cholesky_ex.default, (meta(N, N),), (), N**3 / 3),
        (aten.linalg_ldl_factor_ex.default, (meta(N, N),), (), N**3 / 3),
        (aten._linalg_det.default, (meta(2, 3, N, N),), (), 6 * LU),
        (aten._linalg_slogdet.default, (meta(N, N),), (), LU),
        (aten.linalg_inv_ex.default, (meta(N, N),), (), 3 * LU),
        (aten.cholesky_inverse.default, (meta(N, N),), (), LU),
        (aten._linalg_solve_ex.default, (meta(4, N, N), meta(4, N, 7)), (meta(4, N, 7),), 4 * (LU + 2 * N**2 * 7)),
        (aten._linalg_solve_ex.default, (meta(4, N, N), meta(4, N)), (meta(4, N),), 4 * (LU + 2 * N**2)),
        (aten.linalg_lu_solve.default, (meta(N, N), meta(N), meta(4, N, 7)), (meta(4, N, 7),), 4 * 2 * N**2 * 7),
        (aten.linalg_ldl_solve.default, (meta(N, N), meta(N), meta(N, 7)), (meta(N, 7),), 2 * N**2 * 7),
        (aten.cholesky_solve.default, (meta(N, 7), meta(N, N)), (meta(N, 7),), 2 * N**2 * 7),
        (aten.linalg_solve_triangular.default, (meta(N, N), meta(N, 7)), (meta(N, 7),), N**2 * 7),
        (aten.triangular_solve.default, (meta(N, 7), meta(N, N)), (meta(N, 7),), N**2 * 7),
        (aten._linalg_svd.default, (meta(2 * N, N),), (), 6 * 2 * N**3 + 20 * N**3),
        (aten._linalg_svd.default, (meta(N, 2 * N), True), (), 4 * 4 * N**3 + 22 * N**3),
        (aten._linalg_svd.default, (meta(2 * N, N), False, False), (), 2 * 2 * N**3 + 2 * N**3),
        (aten._linalg_eigh.default, (meta(N, N),), (), 9 * N**3),
        (aten._linalg_eigh.default, (meta(N, N), "L", False), (), 4 / 3 * N**3),
        (aten._linalg_eigvals.default, (meta(N, N),), (), 10 * N**3),
        (aten.linalg_eig.default, (meta(N, N),), (), 25 * N**3),
        (aten.linalg_matrix_exp.default, (meta(N, N),), (), 5 * 2 * N**3),
        (aten.linalg_pinv.atol_rtol_tensor, (meta(2 * N, N),), (), (12 + 20 + 4) * N**3),
        (aten.linalg_lstsq.default, (meta(2 * N, N), meta(2 * N, 7)), (meta(N, 7),),
         (4 - 2 / 3) * N**3 + 2 * 7 * N * 3 * N + N**2 * 7),
        (aten.linalg_inv_ex.default, (meta(3, 0, 0),), (), 0),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)  # fmt: skip
def test_linear_algebra_has_the_textbook_counts(op, args, results, expected):
    assert count(op, *args, results=results) == pytest.approx(expected)


def test_fourier_transforms_count_complex_points():
    lines, points = 6, 64
    z, x = meta(lines, points, dtype=torch.complex64), meta(lines, points, dtype=torch.float32)
    half = meta(lines, points // 2 + 1, dtype=torch.complex64)
    whole = lines * 5 * points * 6
    assert whole == count(aten._fft_c2c.default, z, [1], 0, True, results=(z,))
    assert whole / 2 == count(aten._fft_r2c.default, x, [1], 0, True, results=(half,))
    assert whole / 2 == count(aten._fft_c2r.default, half, [1], 0, points, results=(x,))
    both = count(aten._fft_c2c.default, z, [0], 0, True, results=(z,)) + whole
    assert count(aten._fft_c2c.default, z, [0, 1], 0, True, results=(z,)) == pytest.approx(both)


def test_an_operation_keeps_its_count_when_its_operands_are_replaced():
    x, y = Value("x", meta(4, 5)), Value("y", meta(5, 3))
    product = Operation(aten.mm.default, (x, y), {}, (Value("z", meta(4, 3)),))
    moved = attrs.evolve(product, args=(Value("x_moved", x.meta), y))
    assert 2 * 4 * 5 * 3 == flops(product) == flops(moved)
    assert 0 == flops(Operation(aten.relu.default, (x,), {}, (Value("r", x.meta),)))


@torch.library.custom_op("test_flops::outer", mutates_args=())
def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x[:, None] * y


def test_an_operator_of_the_users_is_counted_by_the_formula_that_torch_has_for_it(monkeypatch):
    op = torch.ops.test_flops.outer
    values = Value("x", meta(4)), Value("y", meta(5))
    operation = Operation(op.default, values, {}, (Value("z", meta(4, 5)),))
    assert 0 == flops(operation)
    monkeypatch.setitem(flop_registry, op, shape_wrapper(lambda x, y, out_shape: x[0] * y[0]))
    assert 4 * 5 == flops(operation)
