"""Matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
import torch

from spmd.rules.builders import aligned, rule, vanish
from spmd.rules.notation import Pattern, Rows, factors
from spmd.rules.partial import increasing, linear
from spmd.rules.rule import Call, Factors, Rule

aten = torch.ops.aten


def _product_plus(pattern: str, *rows: Rows) -> Rule:
    """The rule of a product with sum factors `k` and `l` to which the first operand is added, broadcast."""
    parsed = Pattern.parse(pattern)

    def make(call: Call) -> Factors:
        added, *product = call.operands
        bound = parsed.bind(list(zip(parsed.operands, product, strict=True)), call.results)
        names = [name for (name,) in parsed.results[0]]
        first = aligned(added, names, call.results[0].shape)
        return attrs.evolve(
            bound,
            operands=(first, *bound.operands),
            reduce=dict.fromkeys("kl" if "l" in bound.sizes else "k", "sum"),
            additive=frozenset({0}),
        )

    # A bias of length 1 would make one row where a rank has none.
    return rule(make, increasing("self", times="beta"), *rows, empty=vanish)


MATMUL: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.mm.default: factors("i k, k j -> i j", linear("self", "mat2"), sum="k"),
        aten.bmm.default: factors("b i k, b k j -> b i j", linear("self", "mat2"), sum="k"),
        aten.mv.default: factors("i k, k -> i", linear("self", "vec"), sum="k"),
        aten.dot.default: factors("k, k -> ", linear("self", "tensor"), sum="k"),
        aten.addmm.default: _product_plus("i k, k j -> i j", linear("self mat1", "self mat2")),
        aten.baddbmm.default: _product_plus("b i k, b k j -> b i j", linear("self batch1", "self batch2")),
        aten.addmv.default: _product_plus("i k, k -> i", linear("self mat", "self vec")),
        aten.addbmm.default: _product_plus("k i l, k l j -> i j", linear("self batch1", "self batch2")),
    }
)
