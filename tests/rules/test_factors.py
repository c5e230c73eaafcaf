from __future__ import annotations

import pytest
import torch

from spmd.core.placement import Partial, Replicate, Shard
from spmd.core.spec import TensorMeta
from spmd.errors import RuleError
from spmd.rules import Call, Factors, derive_strategies, factors
from spmd.rules.notation import Pattern, operand_names, tensor_arguments

aten = torch.ops.aten
R = Replicate()


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.float32)


def bind(pattern: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> Factors:
    parsed = Pattern.parse(pattern)
    given = [(term, meta(*shape)) for term, shape in zip(parsed.operands, operands, strict=True)]
    return parsed.bind(given, [meta(*shape) for shape in results])


def test_names_have_sizes() -> None:
    found = bind("i k, k j -> i j", [(2, 3), (3, 4)], [(2, 4)])
    assert ((("i",), ("k",)), (("k",), ("j",))) == found.operands
    assert ((("i",), ("j",)),) == found.results
    assert {"i": 2, "k": 3, "j": 4} == found.sizes


def test_composite_dims() -> None:
    found = bind("(b s) d -> b s d", [(6, 4)], [(2, 3, 4)])
    assert ((("b", "s"), ("d",)),) == found.operands
    assert {"d": 4, "b": 2, "s": 3} == found.sizes


def test_a_composite_dim_tells_one_unknown_factor() -> None:
    assert {"s": 3, "b": 2} == bind("(b s), s -> _", [(6,), (3,)], [(6,)]).sizes


def test_ellipsis_is_aligned_right_and_broadcast() -> None:
    found = bind("..., ... c -> ... c", [(4, 1), (3, 1, 5, 7)], [(3, 4, 5, 7)])
    assert ((("...1",), ()), (("...0",), (), ("...2",), ("c",))) == found.operands
    assert ((("...0",), ("...1",), ("...2",), ("c",)),) == found.results


def test_ellipsis_of_no_dims() -> None:
    assert {"c": 3} == bind("... c -> ... c", [(3,)], [(3,)]).sizes


def test_ellipsis_of_length_one_everywhere_is_a_factor() -> None:
    assert ((("...0",),), (("...0",),)) == bind("..., ... -> ...", [(1,), (1,)], [(1,)]).operands


def test_ellipsis_of_no_elements_broadcasts() -> None:
    found = bind("..., ... -> ...", [(0,), (1,)], [(0,)])
    assert ((("...0",),), ((),)) == found.operands


def test_dims_that_are_never_cut() -> None:
    found = bind("b _ -> b 1", [(2, 5)], [(2, 1)])
    assert ((("b",), ()),) == found.operands == found.results
    assert {"b": 2} == found.sizes


@pytest.mark.parametrize(
    ("pattern", "operands", "results", "why"),
    [
        ("i k, k j -> i j", [(2, 3), (4, 5)], [(2, 5)], "factor 'k' has lengths 3 and 4"),
        ("i k -> i k", [(2, 3, 4)], [(2, 3)], "tensor 0 has another number of dims"),
        ("i -> i", [(2,)], [(2,), (2,)], "it has 1 results, the call 2"),
        ("i 1 -> i", [(2, 3)], [(2,)], "a dim of length 3 stands where 1 is expected"),
        ("(a b) -> a b", [(7,)], [(2, 3)], "(a b) has length 7, not the product of its factors"),
        ("(a b) -> _", [(6,)], [(6,)], "the lengths of (a b) cannot be told"),
    ],
)
def test_misfits_name_pattern_shapes_and_reason(pattern: str, operands: list, results: list, why: str) -> None:
    shapes = f"{', '.join(str(meta(*s)) for s in operands)} -> {', '.join(str(meta(*s)) for s in results)}"
    with pytest.raises(RuleError) as error:
        bind(pattern, operands, results)
    assert f"Factors {pattern!r} do not fit {shapes}: {why}." == str(error.value)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("i k, k j", "must have one '->'"),
        ("i - k -> i", "malformed term 'i - k'"),
        ("... a ... -> a", "more than one '...'"),
    ],
)
def test_malformed_patterns(pattern: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        factors(pattern)


def test_operands_left_out_are_skipped() -> None:
    call = Call(
        aten.nll_loss_forward.default,
        (meta(4, 5), TensorMeta((4,), torch.int64), None, 2, -100),
        {},
        (meta(), meta()),
    )
    rule = factors("b c, b, c -> , ", sum="b", replicate="c")
    assert ((("b",), ("c",)), (("b",),)) == rule.factorize(call).operands
    assert ("self", "target", "weight") == tensor_arguments(call.op)
    assert ("self", "target") == operand_names(call)


def test_operands_among_keyword_arguments_and_in_lists() -> None:
    call = Call(aten.cat.default, ([meta(2), meta(3)],), {"dim": 0}, (meta(5),))
    assert ("tensors", "tensors") == operand_names(call)
    call = Call(aten.sum.default, (), {"self": meta(2)}, (meta(),))
    assert ("self",) == operand_names(call)


def test_arguments_that_a_pattern_leaves_out() -> None:
    call = Call(aten.mm.default, (meta(2, 3), meta(3, 4)), {}, (meta(2, 4),))
    with pytest.raises(RuleError, match=r"'i k -> i _' say nothing of argument 'mat2' of aten.mm.default"):
        factors("i k -> i _").factorize(call)


def test_strategies_of_factors() -> None:
    call = Call(aten.mm.default, (meta(2, 3), meta(3, 4)), {}, (meta(2, 4),))
    found = derive_strategies(factors("i k, k j -> i j", sum="k", replicate="j").factorize(call))
    assert [
        ("replicate", (R, R), (R,)),
        ("i", (Shard(0), R), (Shard(0),)),
        ("k", (Shard(1), Shard(0)), (Partial("sum"),)),
    ] == [(row.label, row.operands, row.results) for row in found]


def test_additive_operands_are_partial_where_a_sum_is_cut() -> None:
    call = Call(aten.addmm.default, (meta(4), meta(2, 3), meta(3, 4)), {}, (meta(2, 4),))
    rule = factors("j, i k, k j -> i j", sum="k", additive="self", replicate="i j")
    assert (Partial("sum"), Shard(1), Shard(0)) == derive_strategies(rule.factorize(call))[-1].operands


def test_atoms_of_a_factor_are_cut_one_by_one() -> None:
    call = Call(aten.t.default, (meta(6, 4),), {}, (meta(4, 6),))
    found = derive_strategies(factors("i j -> j i").factorize(call), {"i": (2, 3), "j": (4,)})
    assert [("i.0", (Shard(0),), (Shard(1),)), ("i.1", (Shard(1),), (Shard(2),)), ("j", (Shard(2),), (Shard(0),))] == [
        (row.label, row.operands, row.results) for row in found[1:]
    ]


def test_a_factor_must_go_somewhere() -> None:
    call = Call(aten.sum.default, (meta(2),), {}, (meta(),))
    with pytest.raises(RuleError, match="Factor 'i' is in no result and neither reduced nor replicated"):
        derive_strategies(factors("i -> ").factorize(call))
