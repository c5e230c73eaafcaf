"""Small calls of fused attention, and reference kernels for CPUs of those operators that have none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from proofs.rule_calls.draws import Calls, Draws, call

aten = torch.ops.aten
_draws = Draws(15)
f = _draws.f

_EXCLUDES = torch.zeros(4, 6, dtype=torch.float64).masked_fill(
    torch.arange(6) < torch.tensor([[0], [2], [4], [6]]), -torch.inf
)
"""A mask that excludes some keys, and all of them for one query."""

_flash = aten._scaled_dot_product_flash_attention_for_cpu.default


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    return scores.masked_fill(torch.ones_like(scores).triu(1) == 1, -torch.inf) if causal else scores


def _for_queries(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values, repeated for every query head that shares them."""
    return x.repeat_interleave(query.shape[1] // max(x.shape[1], 1), 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention and the logarithms of the sums of exponentials."""
    scores = _scores(query, _for_queries(key, query), bias, causal, scale)
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp.unsqueeze(-1)).exp() @ _for_queries(value, query), logsumexp


def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, logsumexp: Tensor,
    causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys, values and bias, from the results of `_attend`."""
    keys, values = _for_queries(key, query), _for_queries(value, query)
    chances = (_scores(query, keys, bias, causal, scale) - logsumexp.unsqueeze(-1)).exp()
    change = chances * (grad @ values.mT - (grad * out).sum(-1, keepdim=True))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    shared = lambda x: x.unflatten(1, (key.shape[1], -1)).sum(2) if x.numel() else torch.zeros_like(key)  # noqa: E731
    return change @ keys * factor, shared(change.mT @ query * factor), shared(chances.mT @ grad), change


def _given(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with `bias` and `grad_out` also where the schema names them differently."""
    schema = op._schema.arguments
    given = {argument.name: argument.default_value for argument in schema} | kwargs
    given |= {argument.name: value for argument, value in zip(schema, args, strict=False)}
    return given | {"bias": given.get("attn_bias"), "grad_out": given.get("grad_out", given.get("grad_out_"))}


def _forward_kernel(op: torch._ops.OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = _given(op, args, kwargs)
        names = ("query", "key", "value", "bias", "is_causal", "scale")
        out, logsumexp = _attend(*(given[name] for name in names))
        if "efficient" in op._schema.name:
            logsumexp = torch.nn.functional.pad(logsumexp, (0, -logsumexp.shape[2] % 32))
        logsumexp = logsumexp.unsqueeze(-1) if "cudnn" in op._schema.name else logsumexp
        rest = (torch.zeros(2) if str(result.type) == "Tensor" else out.shape[2] for result in op._schema.returns[2:])
        return out, logsumexp, *rest

    return kernel


def _backward_kernel(op: torch._ops.OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = _given(op, args, kwargs)
        out, logsumexp = given["out"], given["logsumexp"]
        logsumexp = logsumexp.flatten(2)[:, :, : out.shape[2]]
        grad, query, key, value, bias = (given[name] for name in ("grad_out", "query", "key", "value", "bias"))
        found = _gradients(grad, query, key, value, bias, out, logsumexp, given["is_causal"], given["scale"])
        mask = given.get("grad_input_mask", [True] * 3)
        return tuple(x if asked else None for x, asked in zip(found, mask, strict=False))

    return kernel


_OPERATORS = tuple(
    (getattr(aten, f"_scaled_dot_product_{kernel}"), getattr(aten, f"_scaled_dot_product_{kernel}_backward"))
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")
)
_LIBRARY = torch.library.Library("aten", "IMPL")
for _forward, _backward in _OPERATORS:
    _LIBRARY.impl(_forward.default._schema.name, _forward_kernel(_forward.default), "CPU")
    _LIBRARY.impl(_backward.default._schema.name, _backward_kernel(_backward.default), "CPU")


def _calls(op: Any, *, bias: Tensor | None = None, causal: bool = False, heads: int = 3) -> Calls:
    """A call of a fused attention; if `heads` is 6, each two query heads share a key head."""
    given: dict[str, Any] = {
        "query": f(2, heads, 4, 8),
        "key": f(2, 3, 6, 8),
        "value": f(2, 3, 6, 8),
        "attn_bias": bias,
    }
    given |= {"compute_log_sumexp": True, "dropout_p": 0.0, "is_causal": causal}
    names = [argument.name for argument in op.default._schema.arguments]
    return [call(*(given[name] for name in names if name in given))]


def _backward_calls(op: Any, backward: Any, **options: Any) -> Calls:
    """The call of the gradients of a call of `_calls`."""
    ((args, _),) = _calls(op, **options)
    given = _given(op.default, args, {})
    results = op.default(*args)
    given |= {result.name: value for result, value in zip(op.default._schema.returns, results, strict=True)}
    bias = given["bias"]
    given |= {"out": results[0], "logsumexp": results[1], "grad_out": f(*results[0].shape), "attn_bias": bias}
    given |= {"grad_out_": given["grad_out"], "grad_input_mask": [True, True, True, bias is not None]}
    given |= {"philox_seed": torch.zeros(2), "philox_offset": torch.zeros(2)}
    schema = backward.default._schema.arguments
    return [call(*(given[argument.name] for argument in schema if not argument.kwarg_only))]


def attention_backward(causal: bool, mask: Tensor | None) -> Calls:
    q, k, v = f(2, 3, 4, 8), f(2, 3, 6, 8), f(2, 3, 6, 8)
    out, logsumexp = _flash(q, k, v, 0.0, causal, attn_mask=mask)
    return [call(f(2, 3, 4, 8), q, k, v, out, logsumexp, 0.0, causal, attn_mask=mask)]


def _options(op: Any) -> list[dict[str, Any]]:
    """The options of the calls: none, causal, grouped heads and, if the operator takes one, a bias."""
    biased = [{"bias": f(2, 3, 4, 6)}] if any(a.name == "attn_bias" for a in op.default._schema.arguments) else []
    return [{}, {"causal": True}, {"heads": 6}, *biased]


ATTENTION: dict[torch._ops.OpOverload, Calls] = {
    _flash: [
        call(f(2, 3, 4, 8), f(2, 3, 4, 8), f(2, 3, 4, 8), 0.0, True),
        call(f(2, 3, 4, 8), f(2, 3, 6, 8), f(2, 3, 6, 8), scale=0.3),
        call(f(2, 3, 4, 8), f(2, 3, 6, 8), f(2, 3, 6, 8), attn_mask=f(4, 6)),
        call(f(2, 3, 4, 8), f(2, 3, 6, 8), f(2, 3, 6, 8), attn_mask=f(2, 1, 4, 6)),
        call(f(2, 4, 4, 8), f(2, 2, 6, 8), f(2, 2, 6, 8), attn_mask=_EXCLUDES),
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: [
        *attention_backward(True, None),
        *attention_backward(False, None),
        *attention_backward(False, f(4, 6)),
    ],
    **{op.default: [*itertools.chain(*(_calls(op, **given) for given in _options(op)))] for op, _ in _OPERATORS},
    **{
        backward.default: [*itertools.chain(*(_backward_calls(op, backward, **given) for given in _options(op)))]
        for op, backward in _OPERATORS
    },
}
