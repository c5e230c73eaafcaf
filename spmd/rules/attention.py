"""Fused attention: batch and heads pass through, queries too where no causal mask ties them to their position."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
import torch

from spmd.rules.builders import aligned, nothing, rule
from spmd.rules.notation import Pattern, operand_names
from spmd.rules.partial import linear
from spmd.rules.rule import Call, Factors, Rule

aten = torch.ops.aten

_DIMS = {
    "query": "b h q e", "key": "b h k e", "value": "b h k v", "attn_mask": "b h q k",
    "out": "b h q v", "grad_out": "b h q v", "logsumexp": "b h q",
}  # fmt: skip


def _attention(*results: str) -> Rule:
    """The rule of an attention operator whose results have the dims of these operands."""
    pattern = Pattern.parse(", ".join(_DIMS.values()) + " -> " + ", ".join(_DIMS[result] for result in results))
    terms = dict(zip(_DIMS, pattern.operands, strict=True))

    def make(call: Call) -> Factors:
        names = operand_names(call)
        whole = [(terms[n], meta) for n, meta in zip(names, call.operands, strict=True) if n != "attn_mask"]
        bound = pattern.bind(whole, call.results)
        dims = dict(zip((name for name in names if name != "attn_mask"), bound.operands, strict=True))
        if "attn_mask" in names:
            mask = call.operands[names.index("attn_mask")]
            dims["attn_mask"] = aligned(mask, "bhqk", [bound.sizes[name] for name in "bhqk"])
        operands = tuple(dims[name] for name in names)
        # The backward is given the softmax's denominators, so each pair of query and key counts on its own.
        free = "bhqk" if "grad_out" in names else "bhq"
        if call.argument("is_causal"):
            free = "bh"
        if call.argument("dropout_p"):
            free = ""
        fixed = frozenset(bound.sizes) - set(free)
        return attrs.evolve(bound, operands=operands, reduce={"q": "sum", "k": "sum"}, replicate=fixed)

    # torch's CPU kernels divide by the batch and by the heads, and end the process where there are none.
    return rule(make, linear("grad_out"), empty=nothing)


_FORWARD = _attention("out", "logsumexp")
_BACKWARD = _attention("query", "key", "value")

ATTENTION: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default: _FORWARD,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _BACKWARD,
    }
)
