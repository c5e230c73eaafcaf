"""Operators on DTensors where torch's DTensor has tests: values and gradients under many layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_peer_values import GRID, LINE, PENDING, assert_same, check, layouts, randn, with_gradients
from torch import nn

import spmd
from spmd import P
from spmd.errors import MeshError, ShardingError

pytestmark = pytest.mark.filterwarnings("ignore::spmd.api.programs.missing_rules.MissingRuleWarning")

aten, prims = torch.ops.aten, torch.ops.prims
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0))


def distribute(value: torch.Tensor, spec: P, mesh: spmd.Mesh = LINE) -> spmd.DTensor:
    placed: spmd.DTensor = spmd.distribute(value, spec, mesh)
    return placed


MATRIX, OTHER, CUBOID = randn(8, 6), randn(6, 8).t().contiguous(), randn(6, 4, 5)

POINTWISE: dict[str, Case] = {
    "gelu": (F.gelu, (MATRIX,)),
    "relu": (F.relu, (MATRIX,)),
    "sigmoid": (torch.sigmoid, (MATRIX,)),
    "add": (torch.add, (MATRIX, OTHER)),
    "add, broadcast": (torch.add, (MATRIX, OTHER[:, :1])),
    "mul": (torch.mul, (MATRIX, OTHER)),
    "numbers": (lambda x: (x + 1, x - 1, 7 - x, x * 2, x / 2, x * torch.tensor(2.0)), (MATRIX,)),
    "numbers of aten": (lambda x: (aten.mul.Scalar(x, 2), aten.div.Scalar(x, 2)), (MATRIX,)),
    "twice itself": (lambda x: (x + x, x - x, x * x), (MATRIX,)),
    "norm and numbers": (lambda x: (x.norm() * 2, x.norm() / 2, x.norm() * -2, x.norm() / -2, x.norm() + 1), (MATRIX,)),
    "dropout, not in training": (lambda x: F.dropout(x, 0.4, training=False), (MATRIX,)),
    "dropout": (lambda x: F.dropout(x, 0.5), (MATRIX,)),
    "dropout backward": (lambda x: aten.native_dropout_backward(x, x > 0.3, 0.3), (MATRIX,)),
    "maximum": (lambda x, y: (torch.maximum(x, y), torch.minimum(x, y)), (MATRIX, OTHER)),
    "out=": (lambda x, y, out: torch.mul(x.detach(), y.detach(), out=out.detach()), (MATRIX, OTHER, OTHER + 1)),
    "masked_fill_": (lambda x, mask: (x * 1).masked_fill_(mask, -9.0), (MATRIX, OTHER > 0)),
    "where, types": (lambda x: torch.where(x > 0, 1, 0), (MATRIX,)),
    "where, broadcast": (torch.where, (randn(6) > 0, randn(), randn(1, 1))),
    "lerp": (lambda x, y: torch.lerp(x, y, -1), (MATRIX, OTHER)),
    "add, more dims": (torch.add, (randn(8, 1, 1, 6), randn(8, 4, 6))),
    "add_, more dims": (lambda x, y: (x * 1).add_(y), (randn(8, 4, 6), randn(8, 1, 6))),
    "special functions": (
        lambda x: (torch.special.erfcx(x.abs()), torch.special.ndtri(x.sigmoid()), torch.special.i0e(x)),
        (MATRIX,),
    ),
    "integers": (lambda x, y: (torch.gcd(x, y), prims.gcd(x, y)), (integers(9, 8, 6), integers(7, 8, 6))),
    "ne": (lambda x, y: (prims.ne(x, y), aten.ne(x, y)), (MATRIX, OTHER)),
    "casts": (lambda x: (x.bfloat16().float(), x.float().type_as(x)), (MATRIX,)),
}
BESSEL = ("bessel_i0e", "bessel_i1", "bessel_i1e", "bessel_j0", "bessel_j1", "erfcx", "ndtri", "spherical_bessel_j0")


def reductions(name: str) -> Callable[[torch.Tensor], Any]:
    """The reduction of all elements, and over each dim."""

    def reduce(x: torch.Tensor) -> Any:
        x = x > 0 if name in ("all", "any") else x
        call = getattr(x, name)
        over_dims = [call(dim, keepdim=dim == 1) for dim in range(x.ndim)]
        return call(), [tuple(result) if isinstance(result, tuple) else result for result in over_dims]

    return reduce


def over_dims(function: Callable[[torch.Tensor, int], Any]) -> Callable[[torch.Tensor], Any]:
    return lambda x: [function(x, dim) for dim in (*range(x.ndim - 1), -1)]


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.view_as_complex(x) * torch.polar(torch.ones_like(angles), angles))


def losses(scores: torch.Tensor, target: torch.Tensor) -> Any:
    return [f(scores, target, reduction=r) for f in (F.nll_loss, F.cross_entropy) for r in ("none", "mean", "sum")]


MATH: dict[str, Case] = {
    **{
        name: (reductions(name), (CUBOID,))
        for name in ("all", "any", "sum", "max", "min", "amax", "amin", "var", "std", "mean")
    },
    "softmax": (over_dims(lambda x, dim: (x.softmax(dim), F.softmax(x, dim, dtype=torch.float32))), (CUBOID,)),
    "losses": (losses, (randn(8, 6), integers(6, 8))),
    "losses of images": (losses, (randn(4, 6, 5), integers(6, 4, 5))),
    "layer_norm": (
        lambda x: [F.layer_norm(x, x.shape[dim:]) for dim in range(1, 3)] + [F.rms_norm(x, x.shape[1:])],
        (CUBOID,),
    ),
    "layer_norm, affine": (
        lambda x, w, b: (F.layer_norm(x, (4, 5), w, b), F.rms_norm(x, (4, 5), w)),
        (CUBOID, randn(4, 5), randn(4, 5) - 1),
    ),
    "topk": (over_dims(lambda x, dim: tuple(x.topk(3, dim))), (CUBOID,)),
    "norms": (
        lambda x: [aten.linalg_vector_norm(x, order) for order in (0, 1, 2, 3, torch.inf, -torch.inf)],
        (MATRIX,),
    ),
    "norms of integers": (lambda x: aten.linalg_vector_norm(x, 0), (torch.tensor([0.0, 1, 0, 3, 0, 5]),)),
    "sums of powers": (lambda x: [aten.linalg__powsum(x.detach(), order) for order in (1, 2, 3)], (MATRIX,)),
    "norms of lists": (lambda x, y: aten._foreach_norm([x, y], 2), (MATRIX, CUBOID)),
    "sums of powers of lists": (
        lambda x, y: [aten._foreach_powsum([x.detach(), y.detach()], order) for order in (1, 2, 3)],
        (MATRIX, CUBOID),
    ),
    "largest of lists": (lambda x, y: torch._foreach_max(torch._foreach_abs([x, y])), (MATRIX, CUBOID)),
    "svd": (lambda x: torch.linalg.svd(x.detach(), full_matrices=False), (randn(8, 8),)),
    "eigh": (lambda x: torch.linalg.eigh(x + x.mT).eigenvalues, (randn(4, 4),)),
    "dist": (torch.dist, (MATRIX, OTHER)),
    "upsampling": (
        lambda x: [F.interpolate(x, scale_factor=2, mode=mode) for mode in ("bilinear", "nearest", "bicubic")],
        (randn(4, 2, 3, 3),),
    ),
    "cumsum": (over_dims(torch.cumsum), (CUBOID,)),
    "logsumexp": (over_dims(torch.logsumexp), (CUBOID,)),
    "conj": (lambda x, y: torch.complex(x, y).conj() + 1, (MATRIX, OTHER)),
    "rotary embedding": (rotate, (randn(4, 6, 2), randn(4, 6))),
    "histc": (lambda x: (x.detach().histc(min=-1.0, max=1.0), x.detach().histc()), (MATRIX,)),
}

ROWS, COLUMNS = randn(12, 8), randn(8, 4)
QUERY = randn(4, 2, 6, 3)


def grouped(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    first, second = first.detach(), second.detach()  # sums over ranks of their gradients are rounded to bfloat16
    hidden = F.grouped_mm(x.bfloat16(), first.bfloat16(), offs=ends.int())
    return F.grouped_mm(hidden, second.bfloat16(), offs=ends.int()).double()


def scaled(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    x, y, scale = x.detach(), y.detach().t(), scale.detach()
    return torch._scaled_mm(x, y, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def in_inference_mode(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return function(*args)

    return call


MATRICES: dict[str, Case] = {
    "mm": (torch.mm, (ROWS, COLUMNS)),
    "mm, fewer rows than ranks": (torch.mm, (randn(3, 4), randn(4, 4))),
    **{
        f"addmm, {list(shape)}": (torch.addmm, (randn(*shape), ROWS, COLUMNS))
        for shape in ((4,), (12, 4), (), (1, 4), (12, 1))
    },
    "addmm, empty": (torch.addmm, (randn(4), randn(12, 0), randn(0, 4))),
    "mm of merged dims": (lambda x, w: x.reshape(-1, 3) @ w, (randn(2, 4, 3), randn(3, 7))),
    "mm of merged dims of four": (lambda x, w: x.reshape(-1, 8) @ w, (randn(4, 4, 6, 8), randn(8, 8))),
    "linear": (in_inference_mode(F.linear), (randn(1, 7, 8), randn(6, 8))),
    "matmul": (in_inference_mode(torch.matmul), (randn(3, 8, 6), randn(6, 6))),
    "t": (lambda x: (x.t(), x.t().t()), (ROWS,)),
    "t of one dim": (lambda x: x.t(), (randn(8),)),
    "t of a product": (lambda x, y: (x @ y).t(), (ROWS, COLUMNS)),
    "baddbmm": (
        lambda x, y, z: torch.baddbmm(x, y, z, beta=0.8, alpha=0.5),
        (randn(4, 4, 6), randn(4, 4, 5), randn(4, 5, 6)),
    ),
    "baddbmm, beta 0": (
        lambda x, y, z: torch.baddbmm(x, y, z, beta=0.0, alpha=0.5),
        (randn(4, 4, 6), randn(4, 4, 5), randn(4, 5, 6)),
    ),
    "bmm": (torch.bmm, (randn(4, 8, 4), randn(4, 4, 6))),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (QUERY, QUERY + 1, -QUERY)),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=([0], [0])), (randn(4, 4), randn(4, 15))),
    "einsum": (lambda x, y: torch.einsum("mk,kn->mn", x, y), (randn(8, 4), randn(4, 8))),
    "pad with 0": (lambda x: F.pad(x, [1, 1]), (MATRIX,)),
    "pad with 1": (lambda x: F.pad(x, [1, 1], value=1.0), (MATRIX,)),
    "scaled_mm": (
        scaled,
        (randn(16, 32).to(torch.float8_e4m3fn), randn(48, 32).to(torch.float8_e4m3fn), torch.tensor(0.5)),
    ),
    "grouped_mm": (
        grouped,
        (randn(64, 16).round(), randn(2, 16, 32).round(), randn(2, 32, 16).round(), torch.tensor([16, 64])),
    ),
}

HIGH = randn(6, 8, 5)
FEW, MANY = integers(5, 3, 4), integers(2, 6, 1, 4)


def written(write: Callable[..., Any]) -> Callable[..., Any]:
    """The result of a write, which is the tensor that is written to."""

    def call(x: torch.Tensor, *args: Any) -> torch.Tensor:
        x = x * 1
        result = write(x, *args)
        assert result is x
        return x

    return call


TENSORS: dict[str, Case] = {
    "contiguous": (lambda x: (aten.contiguous(x), x.transpose(0, 2).contiguous()), (CUBOID,)),
    "detach": (lambda x: x.detach(), (MATRIX,)),
    "clone": (lambda x: x.clone(), (MATRIX,)),
    "copy_": (written(torch.Tensor.copy_), (MATRIX, OTHER)),
    "copy_, one dim": (written(torch.Tensor.copy_), (MATRIX, randn(6))),
    "copy_, more dims": (written(torch.Tensor.copy_), (randn(4, 3, 6, 5), randn(6, 1))),
    "in place": (lambda x: (written(lambda y: y.add_(3))(x), written(lambda y: y.mul_(3))(x)), (MATRIX,)),
    "add_": (written(torch.Tensor.add_), (MATRIX, OTHER)),
    "out=": (lambda x, out: torch.add(x.detach(), 3, out=out.detach()), (MATRIX, OTHER)),
    "fill_": (written(lambda x: torch.fill_(x, 42.0)), (MATRIX,)),
    "zero_": (written(torch.zero_), (MATRIX,)),
    "clamp_": (written(lambda x: x.clamp_(max=0.1)), (MATRIX,)),
    "like": (
        lambda x: (torch.full_like(x, 42.0), torch.ones_like(x), torch.zeros_like(x, dtype=torch.bfloat16)),
        (MATRIX,),
    ),
    "new": (lambda x: (x.new_full((4, 8), 42.0), x.new_full((8, 6), 42.0)), (MATRIX,)),
    "stack": (lambda x, y: (torch.stack([x, y]), torch.stack([x, y], 1), torch.stack([x, y], -1)), (MATRIX, OTHER)),
    "scatter": (
        lambda x, index, source: (torch.scatter(x, 0, index, source), torch.scatter(x, 1, index, 4)),
        (integers(9, 3, 5), integers(3, 2, 4), integers(9, 2, 5)),
    ),
    "gather": (lambda x, index: [x.gather(dim, index) for dim in range(3)], (HIGH, integers(5, 4, 4, 4))),
    "gather of one": (lambda x, index: x.gather(1, index), (HIGH, integers(8, 4, 1, 5))),
    "index": (lambda x, i: (x[i], x[..., i], x[i[0]]), (HIGH, FEW)),
    "index_select": (lambda x, i: (x.index_select(0, i), x.index_select(1, i)), (HIGH, integers(5, 4))),
    "two indices": (lambda x, i, j: (x[i, j], x[i, :, j], x[:, i, j]), (HIGH, FEW, integers(2, 3, 4))),
    "two indices, broadcast": (
        lambda x, i, j: (x[:, j, :, i], x[j, i, :, :], x[j, :, :, i]),
        (randn(4, 6, 5, 5), integers(5, 6, 3, 4), MANY),
    ),
    "two indices, fewer dims": (lambda x, i, j: x[:, j, :, i], (randn(4, 6, 5, 5), integers(5, 6, 3, 4), FEW // 3)),
    "index_put of a number": (
        lambda x, i, j, k, value: torch.index_put(x, [i, j, k], value),
        (randn(2, 4, 8), torch.tensor(1), torch.tensor(2), torch.tensor(5), randn()),
    ),
    "slices": (lambda x: (x[:, 3:], x[:, :2], x[:, :6], x[:, :9], x[:2, :]), (MATRIX,)),
    "split": (over_dims(lambda x, dim: [torch.split(x, size, dim) for size in (3, 4)]), (MATRIX,)),
    "unbind": (over_dims(torch.unbind), (MATRIX,)),
    "argmax": (over_dims(lambda x, dim: (x.argmax(dim), x.argmin(dim))), (integers(40, 8, 8) - 20,)),
    "equal": (lambda x, y: (x.equal(x * 1), x.equal(y), x.is_same_size(y)), (MATRIX, OTHER)),
}

EMBEDDINGS: dict[str, Case] = {
    **{
        f"embedding of {list(shape)}": (F.embedding, (integers(17, *shape), randn(17, 12)))
        for shape in ((4,), (5, 4), (3, 2, 4), (3, 2, 1, 4), (2, 1, 3, 2, 2))
    },
    "embedding, padding": (lambda i, w: F.embedding(i, w, padding_idx=10), (integers(15, 34), randn(15, 14))),
    "embedding, uneven": (F.embedding, (integers(13, 6, 7), randn(13, 11))),
    "embedding, the largest norm": (
        lambda i, w: F.embedding(i, w.detach() * 1, max_norm=0.5),
        (integers(15, 6), randn(15, 14)),
    ),
    "two embeddings": (
        lambda i, v, w: (F.embedding(i, v), F.embedding(i, w)),
        (integers(10, 4, 4), randn(10, 7), randn(10, 9)),
    ),
    "embedding and a loss": (
        lambda i, w, target: F.cross_entropy(F.embedding(i, w), target),
        (integers(9, 8), randn(9, 6), integers(6, 8)),
    ),
    "slice": (lambda x: x[:, :5], (randn(16, 10),)),
    "bernoulli": (lambda x: torch.bernoulli(x.sigmoid()), (MATRIX,)),
}

CASES = {
    f"{family}: {name}": case
    for family, cases in (
        ("pointwise", POINTWISE),
        ("math", MATH),
        ("matrix", MATRICES),
        ("tensor", TENSORS),
        ("embedding", EMBEDDINGS),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    function, args = CASES[name]
    check(function, *args)


def put(x: torch.Tensor, i: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.index_put(x, [i], value)


BY_PLAIN_TENSORS: dict[str, Case] = {
    "prod": (lambda x: (x.prod(), x.prod(1)), (CUBOID,)),
    "index_put of a row": (put, (randn(2, 4, 8), torch.tensor(1), randn(4, 8))),
    "index_put of one row at several": (put, (randn(4, 8), torch.tensor([0, 1]), randn(8))),
    "index_put at the same place": (put, (randn(4, 8), torch.tensor([1, 1, 2]), torch.ones(3, 8).double())),
}
"""In the derivatives of these, torch makes plain tensors."""


@pytest.mark.parametrize("name", BY_PLAIN_TENSORS)
def test_gradients_where_derivatives_make_plain_tensors(name: str) -> None:
    function, args = BY_PLAIN_TENSORS[name]
    check(function, *args)


def test_index_put_that_adds() -> None:
    x, i, value = randn(4, 8), torch.tensor([1, 1, 2]), randn(3, 8)
    check(lambda x, i, value: torch.index_put(x, [i], value, accumulate=True), x, i, value)


@pytest.mark.parametrize("name", BESSEL)
def test_pointwise_operators_of_prims(name: str) -> None:
    check(getattr(prims, name), MATRIX.abs().clamp(0.1, 0.9), gradients=False)


def test_a_view_of_prims() -> None:
    check(prims.view_of, MATRIX, gradients=False)


PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "mm": (torch.mm, (randn(6, 8), randn(8, 4))),
    "bmm": (torch.bmm, (randn(4, 5, 4), randn(4, 4, 6))),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=([0], [0])), (randn(4, 4), randn(4, 7))),
}


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["line", "grid"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_under_all_pairs_of_layouts(name: str, mesh: spmd.Mesh) -> None:
    function, args = PRODUCTS[name]
    expected = with_gradients(function, [value.clone() for value in args])
    for specs in itertools.product(*(layouts(value.ndim, mesh) for value in args)):
        placed = [distribute(value, spec, mesh) for value, spec in zip(args, specs, strict=True)]
        assert_same(with_gradients(function, list(placed)), expected)


@pytest.mark.parametrize(
    "axes", [{"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 2, "z": 1}, {"x": 4, "y": 1}, {"x": 1, "y": 4}]
)
def test_products_on_axes_of_one_rank(axes: dict[str, int]) -> None:
    mesh = spmd.make_mesh(axes, runtime="virtual")
    last = mesh.names[-1]
    sums = P(partial=dict.fromkeys(mesh.names, "sum"))
    for left, right in ((P("x"), P(None, last) if last != "x" else P()), (sums, sums)):
        assert_same(distribute(ROWS, left, mesh) @ distribute(COLUMNS, right, mesh), ROWS @ COLUMNS)
    if len(axes) > 1:
        left, right = P(partial={"x": "sum"}), P(partial={last: "sum"})
        assert_same(distribute(ROWS, left, mesh) @ distribute(COLUMNS, right, mesh), ROWS @ COLUMNS)


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_pending_reductions(reduction: Any) -> None:
    """Each rank has a tensor of its own, and the value is their sum, their largest or their smallest."""

    def compute(x: torch.Tensor, y: torch.Tensor) -> Any:
        pairs = x + y, x * y, torch.maximum(x, y), torch.minimum(x, y), torch.stack([x, y]), x * 1 + y[:, :1]
        return (
            pairs,
            x * 2,
            x * -2,
            x + 1,
            x.max(),
            x.min(),
            x.norm(),
            x.amax(0),
            x.split(3),
            x.index_put([x.new_zeros((), dtype=torch.int64)], y[0]),
        )

    held = [randn(8, 6) * (rank + 1) for rank in range(4)]
    others = [randn(8, 6).cos() * (4 - rank) for rank in range(4)]
    x, y = (spmd.DTensor.from_local(shards, LINE, P(partial={"x": reduction})) for shards in (held, others))
    reduce = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[reduction]
    plain = reduce(torch.stack(held), 0), reduce(torch.stack(others), 0)
    assert_same(compute(x, y), compute(*plain))
    replicated = distribute(plain[1], P())
    assert_same(compute(x, replicated), compute(*plain))
    assert_same(torch.maximum(x, distribute(plain[1], PENDING)), torch.maximum(*plain))


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_writes_keep_a_pending_reduction(reduction: Any) -> None:
    spec = P(partial={"x": reduction})
    for write in (
        lambda x: x.clamp_(max=0.1),
        lambda x: x.fill_(8),
        lambda x: x.add_(1),
        lambda x: x.copy_(x * 2),
        lambda x: torch.mul(x, 2, out=x),
    ):
        x, plain = distribute(MATRIX, spec), MATRIX.clone()
        write(x), write(plain)
        assert_same(x, plain)
        assert spec == x.spec.pspec


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), PENDING], ids=repr)
def test_new_tensors_without_values(spec: P) -> None:
    x = distribute(MATRIX, spec)
    with spmd.comms_of(error=True):
        for new, shape in (
            (torch.empty_like(x), (8, 6)),
            (x.new_empty_strided((8, 6), (6, 1)), (8, 6)),
            (x.new_empty_strided((8, 3), (3, 1)), (8, 3)),
        ):
            assert (shape, (shape[1], 1)) == (tuple(new.shape), new.stride())
            assert new.contiguous().dtype == x.dtype


def test_lists_on_several_meshes() -> None:
    first, second = distribute(MATRIX, P("x")), distribute(OTHER, P("y"), GRID)
    assert_same(torch._foreach_norm([first, second], 2), torch._foreach_norm([MATRIX, OTHER], 2))
    assert_same(torch._foreach_add([first, second], [first, second]), [MATRIX * 2, OTHER * 2])
    assert [LINE, GRID] == [result.mesh for result in torch._foreach_add([first, second], 1)]


class Block(nn.Module):
    """An embedding, a layer norm and a linear layer."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding, self.norm, self.linear = nn.Embedding(12, 6), nn.LayerNorm(shape), nn.Linear(6, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(self.embedding(tokens)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", [(6,), (4, 6)], ids=repr)
def test_modules_of_which_some_parameters_are_frozen(shape: tuple[int, ...]) -> None:
    def train(model: nn.Module, parts: tuple[str, ...], tokens: torch.Tensor) -> Any:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(parts))
        result = model(tokens)
        result.square().sum().backward()
        return result, {name: value.grad for name, value in model.named_parameters() if value.requires_grad}

    tokens, specs = integers(12, 8, 4), {"embedding.weight": P("x"), "linear.weight": P("x"), "linear.bias": P("x")}
    for count in (1, 2, 3):
        for parts in itertools.combinations(("embedding", "norm", "linear"), count):
            torch.manual_seed(0)
            model, sharded = Block(shape).double(), Block(shape).double()
            sharded.load_state_dict(model.state_dict())
            for path, value in list(sharded.named_parameters()):
                owner, _, name = path.rpartition(".")
                placed = distribute(value.detach(), specs.get(path, P()))
                setattr(sharded.get_submodule(owner), name, nn.Parameter(placed))
            assert_same(train(sharded, parts, distribute(tokens, P("x"))), train(model, parts, tokens))


SILENT: dict[str, tuple[Callable[..., Any], tuple[P, ...], P]] = {
    "pointwise": (torch.add, (P("x"), P("x")), P("x")),
    "numbers": (lambda x: x * 2 + 1, (P("x"),), P("x")),
    "columns of a product": (lambda x, y: x @ y.t(), (P(), P("x")), P(None, "x")),
    "rows of a product": (lambda x, y: x @ y.t(), (P("x"), P()), P("x")),
    "softmax of the other dim": (lambda x: x.softmax(1), (P("x"),), P("x")),
    "cumsum of the other dim": (lambda x: x.cumsum(1), (P("x"),), P("x")),
    "layer_norm of the other dim": (lambda x: F.layer_norm(x, (6,)), (P("x"),), P("x")),
    "unbind of the other dim": (lambda x: x.unbind(1)[0], (P("x"),), P("x")),
    "stack": (lambda x, y: torch.stack([x, y]), (P("x"), P("x")), P(None, "x")),
    "a cast": (lambda x: x.float(), (P("x"),), P("x")),
    "like": (torch.zeros_like, (P("x"),), P("x")),
    "columns of an embedding": (lambda w, y: F.embedding((y[0] > 0).long(), w), (P(None, "x"), P()), P(None, "x")),
    "pad of the other dim": (lambda x: F.pad(x, [1, 1]), (P("x"),), P("x")),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_sends_nothing(name: str) -> None:
    function, specs, expected = SILENT[name]
    args = [distribute(value, spec) for value, spec in zip((MATRIX, OTHER), specs, strict=False)]
    with spmd.comms_of(error=True):
        result = function(*args)
    assert expected == result.spec.pspec


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "lists whose pairs are on two meshes": (
        lambda: torch._foreach_add([distribute(MATRIX, P("x"))] * 2, [distribute(MATRIX, P("x"), GRID)] * 2),
        MeshError,
        r"has operands on Mesh\(x=4\) and on Mesh\(x=2, y=2\)",
    ),
    "a comparison with a plain tensor": (
        lambda: distribute(MATRIX, P("x")).eq(MATRIX),
        ShardingError,
        r"has a plain tensor f64\[8,6\] beside a DTensor",
    ),
    "shapes that do not broadcast": (
        lambda: distribute(MATRIX, P("x")) + distribute(randn(3), P()),
        RuntimeError,
        "broadcast",
    ),
    "shapes that do not multiply": (lambda: distribute(MATRIX, P("x")) @ distribute(MATRIX, P()), RuntimeError, "dim"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name: str) -> None:
    call, error, text = CALLS[name]
    with pytest.raises(error, match=text):
        call()
