"""Fused attention: batch and heads pass through, on CPU also queries, unless a causal mask depends on their position.

Query heads are `(h g)`: the `g` heads of a group share the head `h` of keys and values.
"""

from __future__ import annotations

from spmd.core.spec import TensorMeta
from spmd.ir.call import Call
from spmd.rules.builders import zero_results
from spmd.rules.notation import by_call, factors, tensor_arguments
from spmd.rules.partial import linear
from spmd.rules.rule import Rule, table

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


def _cpu_forward(call: Call) -> Rule:
    return _attention(call, {}, [_OUT, "b (h g) q"], "b h g" if call.argument("is_causal") else "b h g q")


def _cpu_backward(call: Call) -> Rule:
    """The softmax's logsumexp is an operand, so each pair of query and key contributes independently."""
    free = "b h g" if call.argument("is_causal") else "b h g q k"
    return _attention(call, {"logsumexp": "b (h g) q"}, [_QUERY, _KEY, _VALUE], free, sum=free)


def _attention(call: Call, terms: dict[str, str], results: list[str], free: str, **kinds: str) -> Rule:
    """The rule of an attention operator that can be sharded along the factors `free` if there is no dropout."""
    terms = _TERMS | terms
    operands = ", ".join(terms.get(name, "*") for name in tensor_arguments(call.op))
    fixed = set("bhgqkev") - set("" if call.argument("dropout_p") else free)
    pattern = f"{operands} -> {', '.join(results)}"
    flow = linear("grad_out", "grad_out_") if "grad" in call.op._schema.arguments[0].name else linear("value:0")
    return factors(pattern, flow, replicate=" ".join(sorted(fixed)), **kinds)  # type: ignore[arg-type]


_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")

# torch's CPU kernels divide by the lengths of the batch and of the heads, and crash the process if one is zero.
ATTENTION = table({
    "_scaled_dot_product_flash_attention_for_cpu": by_call(_cpu_forward, empty=zero_results),
    "_scaled_dot_product_flash_attention_for_cpu_backward": by_call(_cpu_backward, empty=zero_results),
    " ".join(f"_scaled_dot_product_{kernel}" for kernel in _KERNELS): by_call(_forward),
    " ".join(f"_scaled_dot_product_{kernel}_backward" for kernel in _KERNELS): by_call(_backward),
})  # fmt: skip
