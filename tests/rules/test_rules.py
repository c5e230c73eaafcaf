from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from optree import tree_leaves
from torch.fx.experimental.proxy_tensor import make_fx

import spmd
from proofs.rule_calls import ARBITRARY, CALLS
from spmd import P
from spmd.core.placement import Partial, Replicate, Shard
from spmd.errors import RuleError
from spmd.rules import RULES, Factors, Rule, derive_strategies, factors, find_rule, linear, pointwise
from spmd.rules.ops.shape import common_factors
from spmd.rules.rule import table
from spmd.testing.rule_check import check_rule
from spmd.testing.rule_check.execute import Example
from spmd.testing.rule_check.search import PlacedRow, _combinations, is_implied

aten = torch.ops.aten
R, Psum, Pmax, Pmin = Replicate(), Partial("sum"), Partial("max"), Partial("min")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.(cholesky|triangular_solve) is deprecated:UserWarning"),
]


def strategies(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> dict[tuple, tuple]:
    example = Example.of(op, args, kwargs)
    rule = find_rule(op)
    assert rule is not None
    return {row.operands: row.results for row in derive_strategies(rule.factorize(example.call))}


ALONE = {op: rule for op, rule in RULES.items() if op.namespace not in ("spmd", "spmd_host")}
"""The rules of operators that run on one device; tests of their own run collectives and calls of the host."""


def test_every_rule_has_calls() -> None:
    assert ALONE.keys() == CALLS.keys()


# The rules of pooling, padding and resampling are made for one, two and three dims alike; three take the longest.
@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=pytest.mark.slow if re.search(r"[a-z]3d", str(op)) else ()) for op in ALONE], ids=str
)
def test_no_row_is_wrong(op: torch._ops.OpOverload) -> None:
    report = check_rule(op, RULES[op], CALLS[op], missing=False, values=op not in ARBITRARY)
    assert () == report.wrong, str(report)
    assert report.passed >= 2 * len(CALLS[op])


@pytest.mark.parametrize(
    "op",
    [aten.cos.default, aten.rsqrt.default, aten.abs.default, aten.eq.Tensor, aten.pow.Tensor_Scalar, aten.gelu.default],
    ids=str,
)
def test_pointwise_operators_are_found_by_their_tag(op: torch._ops.OpOverload) -> None:
    x = torch.rand(4, 5)
    args = {2: (x, x[0]), 1: (x,)}[1 if op._schema.name[6:] in ("cos", "rsqrt", "abs", "gelu") else 2]
    args = (x, 2) if op is aten.pow.Tensor_Scalar else args
    rule = find_rule(op)
    assert op not in RULES and rule is not None
    assert () == check_rule(op, rule, [(args, {})]).wrong


@pytest.mark.parametrize(
    "op", [aten.nonzero.default, aten.add_.Tensor, aten.equal.default, aten.rrelu.default, aten.svd.default], ids=str
)
def test_no_rule(op: torch._ops.OpOverload) -> None:
    assert find_rule(op) is None


def test_rules_are_immutable_and_extended_by_union() -> None:
    mine = pointwise(linear("self"))
    extended = RULES | {aten.cos.default: mine}
    assert extended[aten.cos.default] is mine and aten.cos.default not in RULES
    assert find_rule(aten.cos.default, extended) is mine
    with pytest.raises(TypeError, match="does not support item assignment"):
        RULES[aten.cos.default] = mine  # type: ignore[index]


@pytest.mark.parametrize(
    ("op", "args", "row", "results"),
    [
        (aten.mm.default, (torch.ones(4, 5), torch.ones(5, 3)), (Shard(1), Shard(0)), (Psum,)),
        (aten.mm.default, (torch.ones(4, 5), torch.ones(5, 3)), (R, Psum), (Psum,)),
        (
            aten.addmm.default,
            (torch.ones(3), torch.ones(4, 5), torch.ones(5, 3)),
            (Psum, Shard(1), Shard(0)),
            (Psum,),
        ),
        (aten.add.Tensor, (torch.ones(4), torch.ones(4)), (Psum, Psum), (Psum,)),
        (aten.add.Tensor, (torch.ones(4), 0), (Psum,), (Psum,)),
        (aten.mul.Tensor, (torch.ones(4), torch.ones(4)), (R, Psum), (Psum,)),
        (aten.mul.Tensor, (torch.ones(4), -2.0), (Pmax,), (Pmin,)),
        (aten.neg.default, (torch.ones(4),), (Pmin,), (Pmax,)),
        (aten.amax.default, (torch.ones(4, 5), [1]), (Shard(1),), (Pmax,)),
        (aten.embedding.default, (torch.ones(4, 5), torch.tensor([1])), (Shard(0), R), (Psum,)),
        (aten._log_softmax.default, (torch.ones(4, 5), 1, False), (Shard(1),), (Shard(1),)),
        (aten.view.default, (torch.ones(6, 4), [2, 3, 4]), (Shard(1),), (Shard(1),)),
        (aten.full.default, ([4, 5], 1.0), (), (Shard(1),)),
    ],
)
def test_rows(op: torch._ops.OpOverload, args: tuple, row: tuple, results: tuple) -> None:
    found = derive_strategies(RULES[op].factorize(Example.of(op, args, {}).call))
    assert (row, results) in [(strategy.operands, strategy.results) for strategy in found]


@pytest.mark.parametrize(
    ("op", "args", "row"),
    [
        (aten.add.Tensor, (torch.ones(4), 1.0), (Psum,)),
        (aten.add.Tensor, (torch.ones(4), torch.ones(4)), (Psum, R)),
        (aten.mul.Tensor, (torch.ones(4), torch.ones(4)), (Psum, Psum)),
        (aten.addmm.default, (torch.ones(3), torch.ones(4, 5), torch.ones(5, 3)), (R, Shard(1), Shard(0))),
        (aten.amax.default, (torch.ones(4, 5), [1]), (Pmin,)),
        (aten.linalg_vector_norm.default, (torch.ones(4), torch.inf), (Pmax,)),
        (aten.mse_loss.default, (torch.ones(4), torch.ones(4), 1), (Shard(0), Shard(0))),
        (aten._to_copy.default, (torch.ones(4),), (Psum,)),
    ],
)
def test_rows_that_would_be_wrong(op: torch._ops.OpOverload, args: tuple, row: tuple) -> None:
    kwargs = {"dtype": torch.int64} if op is aten._to_copy.default else {}
    assert row not in strategies(op, *args, **kwargs)


def test_check_rule_finds_wrong_rows() -> None:
    op = aten.addmm.default
    wrong = factors("j, i k, k j -> i j", linear("self", "mat1"), sum="k")
    report = check_rule(op, wrong, [((torch.randn(3), torch.randn(4, 5), torch.randn(5, 3)), {})], missing=False)
    assert {(R, Shard(1), Shard(0)), (Psum, R, R), (R, Psum, R)} == {finding.operands for finding in report.wrong}
    assert "result 0: values differ" in str(report)


def test_check_rule_finds_missing_rows() -> None:
    op = aten.mm.default
    report = check_rule(op, factors("i k, k j -> i j", replicate="i k"), [((torch.randn(4, 5), torch.randn(5, 6)), {})])
    found = {(finding.operands, finding.results) for finding in report.missing}
    assert {
        ((Shard(0), R), (Shard(0),)),
        ((Shard(1), Shard(0)), (Psum,)),
        ((Psum, R), (Psum,)),
        ((R, Psum), (Psum,)),
    } == found


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.sign.default, (torch.tensor(0.3),)),
        (aten.mul.Tensor, (torch.ones(4), torch.tensor(2.0))),
        (aten.all.default, (torch.ones(4, 5, dtype=torch.bool),)),
        (aten.linalg_vector_norm.default, (torch.ones(4, 5), 0)),
        (aten.scatter_add.default, (torch.ones(4, 5), 0, torch.tensor([[0, 3, 1], [2, 1, 0]]), torch.ones(2, 3))),
    ],
    ids=str,
)
def test_rows_that_are_right_by_chance_are_not_missing(op: torch._ops.OpOverload, args: tuple) -> None:
    report = check_rule(op, RULES[op], [(args, {})])
    assert () == report.missing, str(report)


def test_rows_compose() -> None:
    known = [PlacedRow((Pmax, R), (R, R)), PlacedRow((R, Pmax), (R, Pmax)), PlacedRow((R, Shard(0)), (R, Shard(0)))]
    assert is_implied(PlacedRow((Pmax, Pmax), (R, Pmax)), known)
    assert is_implied(PlacedRow((Pmax, Shard(0)), (R, Shard(0))), known)
    assert not is_implied(PlacedRow((Pmax, Pmax), (Pmax, R)), known)
    assert not is_implied(PlacedRow((Psum, R), (R, R)), known)


def test_operators_that_do_not_check_shapes_get_only_what_fits() -> None:
    op, args = aten.embedding_dense_backward.default, (torch.randn(4, 3), torch.tensor([0, 1, 1, 4]), 5, -1, False)
    placements = set(_combinations(Example.of(op, args, {}, checked=False), 100))
    assert (Shard(0), Shard(0)) in placements and (Shard(1), R) in placements
    assert not {(Shard(0), R), (R, Shard(0))} & placements


def test_check_rule_finds_bodies_that_diverge() -> None:
    def body(axes: tuple[str, ...], call: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.ops.spmd.all_reduce(x, "sum", list(axes)) if x.shape[0] == 2 else x

    def factorize(call: Any) -> Factors:
        return attrs.evolve(RULES[aten._softmax.default].factorize(call), bodies={"d0": body})

    report = check_rule(aten._softmax.default, Rule(factorize), [((torch.randn(3, 2), 0, False), {})], missing=False)
    assert "Ranks run different programs" in str(report)


def test_view_that_mixes_dims_is_replicated() -> None:
    assert common_factors((4, 6), (6, 4)) == (((), ()), ((), ()), {})


def test_view_of_factors_in_the_middle() -> None:
    expected = ((("f0",), ("f1", "f2"), ("f3",)), (("f0", "f1"), ("f2", "f3")), {"f0": 2, "f1": 3, "f2": 4, "f3": 5})
    assert expected == common_factors((2, 12, 5), (6, 20))


def test_pointwise_rule_on_an_operator_that_is_none() -> None:
    with pytest.raises(RuleError, match=r"f32\[3\], f32\[3\] -> f32\[2,4\]: factor '...1' has lengths 3 and 4"):
        call = Example.of(aten.stack.default, ([torch.ones(3), torch.ones(3)],), {}).call
        pointwise().factorize(attrs.evolve(call, results=(attrs.evolve(call.results[0], shape=(2, 4)),)))


def test_operators_that_torch_lacks() -> None:
    assert [aten.mm.default] == list(table({"mm? no_such_operator? mm.no_such_overload?": pointwise()}))
    with pytest.raises(RuleError, match=r"torch has no operator aten\.no_such_operator\."):
        table({"mm no_such_operator": pointwise()})


def test_cross_entropy_in_chunks() -> None:
    """An operator that torch defines when it is first used."""
    from torch.nn.modules.linear_cross_entropy import _linear_cross_entropy_batch_chunked as chunked  # since torch 2.13

    scores, table, target = torch.randn(5, 3).double(), torch.randn(4, 3).double(), torch.tensor([0, 3, 1, 1, 2])
    weight, policy = torch.rand(4).double(), (-100, 0.0, 2, "compact", torch.float64, False)
    calls = [
        ((scores, table, target, None, None, "sum", *policy, True, True, False), {}),
        ((scores, table, target, weight, weight, "sum", *policy, False, True, True), {}),
        ((scores, table, target, None, None, "mean", *policy, True, True, False), {}),
    ]
    op = chunked._opoverload
    rule = find_rule(op)
    assert op not in RULES and rule is not None
    report = check_rule(op, rule, calls, missing=False)
    assert ((), 10) == (report.wrong, report.passed), str(report)


def gradient(loss: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda *args: torch.func.grad_and_value(loss, argnums=tuple(range(len(args))))(*args)


def attention(x: torch.Tensor) -> torch.Tensor:
    q = x.view(2, 4, 2, 4).transpose(1, 2)
    scores = q @ q.transpose(-1, -2) / 2.0
    causal = torch.ones(4, 4, dtype=torch.bool).tril().logical_not()
    mixed = torch.softmax(scores.masked_fill(causal, -torch.inf) + torch.full((4, 4), -9.0).triu(1), -1) @ q
    return mixed.transpose(1, 2).reshape(2, 4, 8).square().sum()


PROGRAMS = {
    "linear": (lambda x, w, b: F.linear(x, w, b).sum(), (2, 4, 8), (3, 8), (3,)),
    "attention": (attention, (2, 4, 8)),
    "flash": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum(), (2, 2, 4, 8)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b).sum(), (2, 4, 8), (8,), (8,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w).sum(), (2, 4, 8), (8,)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.ones(4, dtype=torch.int64), ignore_index=2), (4, 6)),
    "smoothed": (lambda x: F.cross_entropy(x, torch.ones(4, dtype=torch.int64), label_smoothing=0.1), (4, 6)),
    "embedding": (lambda w: F.embedding(torch.ones(2, 4, dtype=torch.int64), w).sum(), (6, 8)),
    "one_hot": (lambda x: (x * (x.argmax(1)[:, None] == torch.arange(6))).sum(), (4, 6)),
    "activations": (
        lambda x: sum(
            f(x).sum() for f in (F.gelu, F.silu, F.relu, F.softplus, F.leaky_relu, torch.tanh, torch.sigmoid, torch.abs)
        ),
        (4, 6),
    ),
    "losses": (lambda x: F.mse_loss(x, x * 2) + F.smooth_l1_loss(x, x * 2) + F.huber_loss(x, x * 2), (4, 6)),
    "bce": (lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid()), (4, 6)),
    "reductions": (
        lambda x: x.amax(1).sum() + x.max() + x.max(0).values.sum() + x.var(1).sum() + x.mean() + x.logsumexp(1).sum(),
        (4, 6),
    ),
    "norms": (lambda x: torch.linalg.vector_norm(x) + x.norm(dim=1).sum(), (4, 6)),
    "pieces": (
        lambda x: (torch.cat([x, x[:, 1:3]], 1)[:, :6] + torch.stack(x.split(2, 1)).sum() + x.unbind(1)[0].sum()).sum(),
        (4, 6),
    ),
    "clip": (lambda x: (x * (1.0 / (x.square().sum().sqrt() + 1e-6)).clamp(max=1.0)).sum(), (4, 6)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operators_of_training_have_rules(name: str) -> None:
    loss, *shapes = PROGRAMS[name]
    tensors = [torch.rand(shape) for shape in shapes]
    module = make_fx(torch.func.functionalize(gradient(loss)), tracing_mode="fake")(*tensors)
    ops = {node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert ops and [] == sorted(str(op) for op in ops if find_rule(op) is None)


def assert_equal_results(expected: Any, actual: Any) -> None:
    for wanted, given in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        torch.testing.assert_close(given.full_tensor(), wanted)


def test_bodies_compose_with_shards_on_other_axes() -> None:
    """Classes over one axis and the batch over another, both uneven, and a vocabulary over both."""
    mesh = spmd.make_mesh({"data": 2, "model": 3}, runtime="virtual")
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(61, 8191, generator=generator, dtype=torch.float64)
    weight, target = scores[0].exp(), torch.randint(8191, (61,), generator=generator)
    target[3] = 2

    def loss(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> Any:
        return gradient(lambda scores: F.cross_entropy(scores, target, weight, ignore_index=2))(scores)

    sharded = spmd.jit(loss, (P("data", "model"), P("data"), P()), (P("data", "model"), P()), mesh=mesh)
    plan = sharded.plan(scores, target, weight)
    assert {"all_reduce"} == {comm.kind for comm in plan.comms}
    assert_equal_results(loss(scores, target, weight), sharded(scores, target, weight))

    table, indices = torch.randn(1001, 64, generator=generator), torch.randint(1001, (5, 3), generator=generator)

    def embed(table: torch.Tensor, indices: torch.Tensor) -> Any:
        return gradient(lambda table: F.embedding(indices, table, padding_idx=1).square().sum())(table)

    sharded = spmd.jit(embed, (P(("model", "data")), P()), (P(("model", "data")), P()), mesh=mesh)
    assert {"all_reduce"} == {comm.kind for comm in sharded.plan(table, indices).comms}
    assert_equal_results(embed(table, indices), sharded(table, indices))
