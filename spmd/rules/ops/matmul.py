"""Matrix products."""

from __future__ import annotations

from spmd.ir.call import Call
from spmd.rules.builders import dim_names, empty_results, replicated_only
from spmd.rules.notation import Rows, by_call, factors
from spmd.rules.partial import increasing, linear
from spmd.rules.rule import Rule, table


def _product_plus(pattern: str, *rows: Rows, sum: str = "k") -> Rule:
    """The rule of a product to which the first operand, times `beta`, is added."""
    rows = (increasing("self", times="beta", arithmetic=True), *rows)
    # Added to an empty shard, a bias of length 1 would make a row.
    return factors(pattern, *rows, sum=sum, additive="self", empty=empty_results)


def _trilinear(call: Call) -> Rule:
    """A product of three tensors, each with new dims of length 1 at its `expand` argument, summed over `sumdim`."""
    expanded = [call.argument(f"expand{i}") for i in (1, 2, 3)]
    names = dim_names(call.operands[0].ndim + len(expanded[0]))
    summed = " ".join(names[dim] for dim in call.argument("sumdim"))
    own = [" ".join(name for dim, name in enumerate(names) if dim not in new) for new in expanded]
    result = " ".join(name for name in names if name not in summed.split())
    return factors(f"[{own[0]}], [{own[1]}], [{own[2]}] -> {result}", linear("i1", "i2", "i3"), sum=summed)


def _scaled(call: Call) -> Rule:
    """A product of 8-bit floats with one scale per tensor, or one per row of the left and per column of the right.

    With scales per block nothing can be sharded, as a block spans rows and columns. `k` can be sharded only if the
    result has at least 32 bits, as partial sums would otherwise be rounded.
    """
    (rows, _), (_, columns) = (call.argument(name).shape for name in ("self", "mat2"))
    left, right = (scale if isinstance(scale := call.argument(f"scale_{x}"), list) else [scale] for x in "ab")
    if not all(scale.numel == 1 or scale.shape == (rows, 1) for scale in left):
        return replicated_only()
    if not all(scale.numel == 1 or scale.shape == (1, columns) for scale in right):
        return replicated_only()
    fixed = "k" if call.results[0].dtype.itemsize < 4 else ""
    return factors("i k, k j, [i _], [_ j], j, _ -> i j", sum="k", additive="bias", replicate=fixed)


MATMUL = table({
    "mm": factors("i k, k j -> i j", linear("self", "mat2"), sum="k"),
    "bmm": factors("b i k, b k j -> b i j", linear("self", "mat2"), sum="k"),
    "mv": factors("i k, k -> i", linear("self", "vec"), sum="k"),
    "dot": factors("k, k -> ", linear("self", "tensor"), sum="k"),
    "addmm": _product_plus("[i j], i k, k j -> i j", linear("self mat1", "self mat2")),
    "baddbmm": _product_plus("[b i j], b i k, b k j -> b i j", linear("self batch1", "self batch2")),
    "addmv": _product_plus("[i], i k, k -> i", linear("self mat", "self vec")),
    "addbmm": _product_plus("[i j], b i k, b k j -> i j", linear("self batch1", "self batch2"), sum="b k"),
    "_trilinear": by_call(_trilinear),
    "_scaled_mm _scaled_mm_v2": by_call(_scaled),
})  # fmt: skip
