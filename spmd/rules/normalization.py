"""Layer norm and batch norm, also over a sharded normalized dim: ranks then sum what the statistics are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.collectives import psum
from spmd.rules.builders import dim_names, nothing, rule, vanish
from spmd.rules.notation import factors, operand_names
from spmd.rules.partial import linear
from spmd.rules.rule import Call, FactorDims, Factors, Rule
from spmd.spec import TensorMeta

aten = torch.ops.aten

_PARAMETERS = ("weight", "bias")


def _wide(x: Tensor) -> Tensor:
    """`x` in the precision in which torch's kernels accumulate."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _normalized(
    x: Tensor, dims: tuple[int, ...], count: int, eps: float, axes: tuple[str, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """`x` less its mean over `dims` (`count` elements on all ranks), the mean and the variance, those dims kept."""
    mean = psum(x.sum(dims, keepdim=True), axes) / count
    centered = x - mean
    return centered, mean, psum((centered * centered).sum(dims, keepdim=True), axes) / count


def _norm(call: Call) -> Factors:
    """Tensors are whole, or statistics of the leading dims, or parameters over the normalized dims."""
    names = operand_names(call)
    whole = call.operands[names.index("input")]
    factors = dim_names(whole.ndim)
    leading = whole.ndim - len(call.argument("normalized_shape"))

    def place(meta: TensorMeta, parameter: bool) -> FactorDims:
        if parameter:
            return tuple((name,) for name in factors[leading:])
        statistic = meta.shape[leading:] != whole.shape[leading:]
        return tuple((name,) if i < leading or not statistic else () for i, name in enumerate(factors))

    backward = "output_mask" in {argument.name for argument in call.op._schema.arguments}
    # The gradient of the input comes first where it is asked for; those of the parameters follow.
    inputs = int(call.argument("output_mask")[0]) if backward else len(call.results)
    return Factors(
        tuple(place(meta, name in _PARAMETERS) for name, meta in zip(names, call.operands, strict=True)),
        tuple(place(meta, i >= inputs) for i, meta in enumerate(call.results)),
        dict(zip(factors, whole.shape, strict=True)),
        reduce=dict.fromkeys(factors[:leading], "sum") if backward else {},
        bodies=dict.fromkeys(factors[leading:], _layer_norm_backward if backward else _layer_norm),
    )


def _layer_norm(
    axes: tuple[str, ...],
    call: Call,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    centered, mean, variance = _normalized(_wide(x), dims, math.prod(normalized_shape), eps, axes)
    rstd = (variance + eps).rsqrt()
    out = centered * rstd
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return tuple(t.to(meta.dtype) for t, meta in zip((out, mean, rstd), call.results, strict=True))


def _layer_norm_backward(
    axes: tuple[str, ...],
    call: Call,
    grad: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    first = x.ndim - len(normalized_shape)
    dims, leading = tuple(range(first, x.ndim)), tuple(range(first))
    normal, given = (_wide(x) - mean) * rstd, _wide(grad)
    scaled = given if weight is None else given * weight
    dx, count = None, math.prod(normalized_shape)
    if mask[0]:
        sums = torch.stack([t.sum(dims, keepdim=True) for t in (scaled, scaled * normal)])
        total, moment = psum(sums, axes).unbind()
        dx = (rstd * (scaled - total / count - normal * (moment / count))).to(x.dtype)
    dw, db = ((t.sum(leading) if leading else t).to(x.dtype) for t in (given * normal, given))
    return dx, dw if mask[1] else None, db if mask[2] else None


def _per_channel(call: Call) -> Factors:
    """Batch norm: images `n c ...` and vectors of channels."""
    names = {argument.name for argument in call.op._schema.arguments}
    backward = "output_mask" in names
    image = call.operands[operand_names(call).index("input")]
    factors = dim_names(image.ndim)
    over = [name for i, name in enumerate(factors) if i != 1]

    def place(meta: TensorMeta) -> FactorDims:
        if meta.ndim == image.ndim:
            return tuple((name,) for name in factors)
        return ((factors[1],) if meta.shape == image.shape[1:2] else (),)

    body = _batch_norm_backward if backward else _batch_norm
    trains = _trains(call)
    return Factors(
        tuple(map(place, call.operands)),
        tuple(map(place, call.results)),
        dict(zip(factors, image.shape, strict=True)),
        reduce=dict.fromkeys(over, "sum") if backward and not trains else {},
        bodies=dict.fromkeys(over, body) if trains else {},
        independent=frozenset(factors),
    )


def _trains(call: Call) -> bool:
    """Whether a batch norm takes the statistics of its input, not the running ones."""
    names = {argument.name for argument in call.op._schema.arguments} & {"training", "train", "update"}
    return bool(call.argument(names.pop())) if names else "no_training" not in call.op._schema.name


def _column(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(-1, *(1,) * (x.ndim - 2))


def _batch_norm(
    axes: tuple[str, ...], call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any
) -> tuple[Tensor, ...]:
    """With statistics over all ranks: the result, the mean, the inverse deviation, and running statistics if asked."""
    eps, momentum = call.argument("eps"), call.argument("momentum")
    dims = tuple(dim for dim in range(x.ndim) if dim != 1)
    count = math.prod(size for dim, size in enumerate(call.operands[0].shape) if dim != 1)
    centered, mean, variance = _normalized(_wide(x), dims, count, eps, axes)
    invstd = (variance + eps).rsqrt()
    out = centered * invstd
    out = out if weight is None else out * _column(weight, x)
    out = out if bias is None else out + _column(bias, x)
    results = [out, mean.flatten(), invstd.flatten()]
    if len(call.results) > 3:
        unbiased = variance.flatten() * (count / max(count - 1, 1))
        pairs = zip(args[:2], (results[1], unbiased), strict=True)
        running = [old * (1 - momentum) + new * momentum for old, new in pairs]
        reserve = [x.new_empty(meta.shape, dtype=meta.dtype) for meta in call.results[3:-2]]
        results += [*reserve, *running]
    return tuple(t.to(meta.dtype) for t, meta in zip(results, call.results, strict=True))


def _batch_norm_backward(
    axes: tuple[str, ...], call: Call, grad: Tensor, x: Tensor, weight: Tensor | None, *args: Any
) -> tuple[Tensor | None, ...]:
    mean, invstd, mask = args[2], args[3], call.argument("output_mask")
    dims = tuple(dim for dim in range(x.ndim) if dim != 1)
    count = math.prod(size for dim, size in enumerate(call.operands[0].shape) if dim != 1)
    given, normal = _wide(grad), (_wide(x) - _column(mean, x)) * _column(invstd, x)
    total, moment = psum(torch.stack([t.sum(dims) for t in (given, given * normal)]), axes).unbind()
    scale = _column(invstd if weight is None else invstd * weight, x)
    dx = scale * (given - _column(total / count, x) - normal * _column(moment / count, x))
    asked = zip((dx.to(x.dtype), moment.to(mean.dtype), total.to(mean.dtype)), mask, strict=True)
    return tuple(gradient if wanted else None for gradient, wanted in asked)


def _plain_gradients(_: tuple[str, ...], call: Call, grad: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    """Zeros where there are no elements: torch's kernel divides by their number."""
    mask = call.argument("output_mask")
    if grad.numel():
        found = call.op(grad, *args[:-1], [True] * 3)
        return tuple(gradient if wanted else None for gradient, wanted in zip(found, mask, strict=True))
    made = iter(nothing((), call, grad, *args))
    return tuple(next(made) if wanted else None for wanted in mask)


def _groups(call: Call) -> Factors:
    """Group norm: groups `g` of channels `(g c)`; the operator takes the sizes of its input apart."""
    found = factors("n (g c) ..., (g c), (g c) -> n (g c) ..., n g, n g").factorize(call)
    bodies = {name: _own_groups if name == "g" else _group_norm for name in found.sizes if name != "n"}
    return attrs.evolve(found, bodies=bodies)


def _own_groups(
    axes: tuple[str, ...],
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    channels: int,
    space: int,
    groups: int,
    eps: float,
) -> Any:
    """Some of the groups."""
    if not x.numel():
        return nothing((), call, x, *(t for t in (weight, bias) if t is not None))
    held = x.shape[1]
    return call.op(x, weight, bias, x.shape[0], held, space, held * groups // channels, eps)


def _group_norm(
    axes: tuple[str, ...],
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    channels: int,
    space: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """Some channels of every group, or some of the space."""
    grouped = _wide(x).reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)
    centered, mean, variance = _normalized(grouped, (2,), channels // groups * space, eps, axes)
    rstd = (variance + eps).rsqrt()
    out = (centered * rstd).reshape(x.shape)
    out = out if weight is None else out * _column(weight, x)
    out = out if bias is None else out + _column(bias, x)
    results = (out, mean.squeeze(2), rstd.squeeze(2))
    return tuple(t.to(meta.dtype) for t, meta in zip(results, call.results, strict=True))


_CHANNELS = rule(_per_channel, empty=vanish)

NORMALIZATION: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.native_layer_norm.default: rule(_norm),
        aten.native_layer_norm_backward.default: rule(_norm, linear("grad_out")),
        aten.native_group_norm.default: rule(_groups, size_argument=3, empty=vanish),
        aten.native_batch_norm.default: _CHANNELS,
        aten._native_batch_norm_legit.no_stats: _CHANNELS,
        aten._native_batch_norm_legit_functional.default: _CHANNELS,
        aten._native_batch_norm_legit_no_training.default: _CHANNELS,
        aten._batch_norm_with_update_functional.default: _CHANNELS,
        aten.native_batch_norm_backward.default: rule(_per_channel, linear("grad_out"), empty=_plain_gradients),
    }
)
