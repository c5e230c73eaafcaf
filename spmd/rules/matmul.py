"""Matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
import torch

from spmd.rules.builders import aligned, dim_names, rule, vanish
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


def _trilinear(call: Call) -> Factors:
    """A product of three tensors, each with new dims of length 1 at `expand`, summed over `sumdim`."""
    expanded = [call.argument(f"expand{i}") for i in (1, 2, 3)]
    names = dim_names(call.operands[0].ndim + len(expanded[0]))
    own = [[name for dim, name in enumerate(names) if dim not in new] for new in expanded]
    pairs = [
        pair for names, meta in zip(own, call.operands, strict=True) for pair in zip(names, meta.shape, strict=True)
    ]
    sizes = {name: max(size for other, size in pairs if other == name) for name, _ in pairs}
    operands = tuple(
        tuple((name,) if size == sizes[name] else () for name, size in zip(names, meta.shape, strict=True))
        for names, meta in zip(own, call.operands, strict=True)
    )
    summed = [names[dim] for dim in call.argument("sumdim")]
    result = tuple((name,) if name in sizes else () for name in names if name not in summed)
    return Factors(operands, (result,), sizes, reduce=dict.fromkeys(summed, "sum"))


MATMUL: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.mm.default: factors("i k, k j -> i j", linear("self", "mat2"), sum="k"),
        aten.bmm.default: factors("b i k, b k j -> b i j", linear("self", "mat2"), sum="k"),
        aten.mv.default: factors("i k, k -> i", linear("self", "vec"), sum="k"),
        aten.dot.default: factors("k, k -> ", linear("self", "tensor"), sum="k"),
        aten.addmm.default: _product_plus("i k, k j -> i j", linear("self mat1", "self mat2")),
        aten.baddbmm.default: _product_plus("b i k, b k j -> b i j", linear("self batch1", "self batch2")),
        aten.addmv.default: _product_plus("i k, k -> i", linear("self mat", "self vec")),
        aten._trilinear.default: rule(_trilinear, linear("i1", "i2", "i3")),
        aten.addbmm.default: _product_plus("k i l, k l j -> i j", linear("self batch1", "self batch2")),
    }
)
