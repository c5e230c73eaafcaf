"""Fused attention: batch and heads pass through, on CPU also queries and keys, unless a causal mask depends on them.

Query heads are `(h g)`: the `g` heads of a group share the head `h` of keys and values. Keys that are sharded, as in
the cache of a long sequence, are attended to where they are, and results are merged: twice the queries' size is sent.

Source of the merge: online softmax (Milakov and Gimelshein, 2018), as in FlashAttention's split of keys (Dao et al.).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spmd.collectives import pmax, psum
from spmd.core.spec import TensorMeta
from spmd.ir.call import Call
from spmd.rules.builders import zero_results
from spmd.rules.notation import by_call, factors, tensor_arguments
from spmd.rules.ops.merges import widen
from spmd.rules.partial import linear
from spmd.rules.rule import Axes, Rule, table

_QUERY, _KEY, _VALUE, _OUT, _MASK = "b (h g) q e", "b h k e", "b h k v", "b (h g) q v", "[b (h g) q k]"
_TERMS = {
    "query": _QUERY, "key": _KEY, "value": _VALUE, "attn_mask": _MASK, "attn_bias": _MASK,
    "out": _OUT, "grad_out": _OUT, "grad_out_": _OUT,
}  # fmt: skip
"""The terms of arguments; those that are not here, such as the random state, are replicated."""


def _logsumexp(meta: TensorMeta) -> str:
    """The term of the softmax's logsumexp: kernels may pad its query dim, or add a dim of length 1."""
    return f"b (h g){' _' * (meta.ndim - 2)}" if meta.ndim > 2 else "*"


def _forward(call: Call) -> Rule:
    logsumexp, *others = call.results[1:]
    results = [_OUT, _logsumexp(logsumexp), *("*" for _ in others)]
    return _attention(call, {}, results, "b h g", independent="b h g")


def _backward(call: Call) -> Rule:
    mask = call.argument("grad_input_mask", [True] * 3)
    results = [term for term, requested in zip((_QUERY, _KEY, _VALUE, _MASK), mask, strict=False) if requested]
    denominators = {"logsumexp": _logsumexp(call.argument("logsumexp"))}
    return _attention(call, denominators, results, "b h g", sum="b h g")


def _over_keys(
    axes: Axes,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Merge by the sum of the ranks' results, weighted by their sums of exponentials."""
    nowhere = -math.inf
    if key.numel() and query.numel():
        out, logs = call.op(query, key, value, *args, attn_mask=attn_mask, **options)
        if attn_mask is not None:  # where it excludes all keys, the kernel's results are zero
            logs = torch.where((attn_mask == nowhere).all(-1), torch.full_like(logs, nowhere), logs)
    else:
        out = query.new_zeros([*query.shape[:-1], value.shape[-1]])
        logs = widen(query).new_full(query.shape[:-1], nowhere)
    largest = pmax(logs, axes)
    shift = torch.where(largest == nowhere, torch.zeros_like(largest), largest)
    weight = (logs - shift).exp().unsqueeze(-1)
    total, weighted = psum(torch.cat([weight, widen(out) * weight], -1), axes).tensor_split([1], -1)
    seen = total != 0
    merged = torch.where(seen, weighted / total, torch.zeros_like(weighted))
    logs = torch.where(seen, total.log() + shift.unsqueeze(-1), torch.zeros_like(total)).squeeze(-1)
    return merged.to(out.dtype), logs


def _cpu_forward(call: Call) -> Rule:
    results = [_OUT, "b (h g) q"]
    if call.argument("is_causal"):
        return _attention(call, {}, results, "b h g")
    return _attention(call, {}, results, "b h g q k", bodies={"k": _over_keys})


def _cpu_backward(call: Call) -> Rule:
    """The softmax's logsumexp is an operand, so each pair of query and key contributes independently."""
    free = "b h g" if call.argument("is_causal") else "b h g q k"
    return _attention(call, {"logsumexp": "b (h g) q"}, [_QUERY, _KEY, _VALUE], free, sum=free)


def _attention(call: Call, terms: dict[str, str], results: list[str], free: str, **kinds: Any) -> Rule:
    """The rule of an attention operator that can be sharded along the factors `free` if there is no dropout."""
    terms = _TERMS | terms
    operands = ", ".join(terms.get(name, "*") for name in tensor_arguments(call.op))
    fixed = set("bhgqkev") - set("" if call.argument("dropout_p") else free)
    pattern = f"{operands} -> {', '.join(results)}"
    flow = linear("grad_out", "grad_out_") if "grad" in call.op._schema.arguments[0].name else linear("value:0")
    if call.argument("dropout_p"):
        kinds.pop("bodies", None)
    return factors(pattern, flow, replicate=" ".join(sorted(fixed)), **kinds)


_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")

# torch's CPU kernels divide by the lengths of the batch and of the heads, and crash the process if one is zero.
ATTENTION = table({
    "_scaled_dot_product_flash_attention_for_cpu": by_call(_cpu_forward, empty=zero_results),
    "_scaled_dot_product_flash_attention_for_cpu_backward": by_call(_cpu_backward, empty=zero_results),
    " ".join(f"_scaled_dot_product_{kernel}" for kernel in _KERNELS): by_call(_forward),
    " ".join(f"_scaled_dot_product_{kernel}_backward" for kernel in _KERNELS): by_call(_backward),
})  # fmt: skip
