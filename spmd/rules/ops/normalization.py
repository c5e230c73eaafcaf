"""Layer, group and batch norm. Where a normalized dim is sharded, ranks all-reduce the sums for its statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from spmd.collectives import psum
from spmd.core.spec import TensorMeta
from spmd.ir.call import Call
from spmd.rules.builders import dim_names, empty_results, requested, rule, zero_results
from spmd.rules.notation import by_call, factors, spell, term
from spmd.rules.ops.merges import widen
from spmd.rules.partial import ignores, increasing, linear
from spmd.rules.rule import Axes, Factors, Row, Rule, table

_Dims: TypeAlias = tuple[int, ...]
_Vector: TypeAlias = Tensor | None
_Results: TypeAlias = tuple[Tensor, ...]
_Gradients: TypeAlias = tuple[Tensor | None, ...]


def _affine_rows(call: Call) -> Iterator[Row]:
    """The result is jointly linear in weight and bias, and nondecreasing in the bias."""
    yield from linear("weight bias:0")(call) if call.argument("weight") is not None else ()
    yield from increasing("bias:0")(call)


def _unread_statistics(call: Call) -> Iterator[Row]:
    """The gradient reads the statistics of the batch in training, and the running ones otherwise."""
    names = ("running_mean", "running_var") if call.argument("train") else ("save_mean", "save_invstd")
    yield from ignores(*names)(call)


def _scaled(call: Call) -> Iterator[Row]:
    """The gradient of the input is linear in the weight; the other gradients do not depend on it."""
    yield from (linear("weight:0") if call.argument("output_mask")[0] else ignores("weight"))(call)


def _normalized(x: Tensor, dims: _Dims, count: int, eps: float, axes: Axes) -> tuple[Tensor, ...]:
    """`x` normalized over `dims`, and the mean, inverse standard deviation and variance over them.

    `count` is the number of elements of `dims` on all ranks.
    """
    mean = psum(x.sum(dims, keepdim=True), axes) / count
    centered = x - mean
    variance = psum((centered * centered).sum(dims, keepdim=True), axes) / count
    inverse = (variance + eps).rsqrt()
    return centered * inverse, mean, inverse, variance


def _differentiated(
    grad: Tensor, normal: Tensor, inverse: Tensor, dims: _Dims, count: int, axes: Axes
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the normalization's input, and the sums over `dims` of `grad` and of `grad * normal`."""
    sums = torch.stack([t.sum(dims, keepdim=True) for t in (grad, grad * normal)])
    total, moment = psum(sums, axes).unbind()
    return inverse * (grad - total / count - normal * (moment / count)), total, moment


def _affine(x: Tensor, weight: _Vector, bias: _Vector) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _finished(call: Call, *results: Tensor) -> _Results:
    return tuple(result.to(meta.dtype) for result, meta in zip(results, call.results, strict=True))


def _gradients(call: Call, *gradients: Tensor) -> _Gradients:
    """The gradients of input, weight and bias in the dtypes of the call's results; None for those not requested."""
    metas = iter(call.results)
    return tuple(None if x is None else x.to(next(metas).dtype) for x in requested(call, *gradients))


def _column(vector: _Vector, x: Tensor) -> Any:
    """A vector over channels, reshaped to broadcast with images `x`."""
    return None if vector is None else vector.view(-1, *(1,) * (x.ndim - 2))


def _terms(call: Call) -> tuple[str, str, str, str]:
    """The terms of a layer norm's input, of its statistics, of its parameters, and of the input's leading dims."""
    names = dim_names(call.argument("input").ndim)
    leading = len(names) - len(call.argument("normalized_shape"))
    own = names[leading:]
    return term(names), term(names, own), term(own), term(names[:leading])


def _layer(call: Call) -> Rule:
    x, statistic, parameter, _ = _terms(call)
    pattern = f"{x}, {parameter}, {parameter} -> {x}, {statistic}, {statistic}"
    return factors(pattern, _affine_rows, bodies={parameter: _layer_norm})


def _layer_backward(call: Call) -> Rule:
    x, statistic, parameter, leading = _terms(call)
    results = ", ".join(result for result in requested(call, x, parameter, parameter) if result is not None)
    pattern = f"{x}, {x}, {statistic}, {statistic}, {parameter}, {parameter} -> {results}"
    return factors(
        pattern, linear("grad_out"), _scaled, ignores("bias"), sum=leading, bodies={parameter: _layer_norm_backward}
    )


def _own_dims(x: Tensor, shape: list[int]) -> tuple[_Dims, _Dims]:
    """The normalized dims, and the leading dims."""
    first = x.ndim - len(shape)
    return tuple(range(first, x.ndim)), tuple(range(first))


def _layer_norm(
    axes: Axes, call: Call, x: Tensor, shape: list[int], weight: _Vector, bias: _Vector, eps: float
) -> _Results:
    normal, mean, rstd, _ = _normalized(widen(x), _own_dims(x, shape)[0], math.prod(shape), eps, axes)
    return _finished(call, _affine(normal, weight, bias), mean, rstd)


def _layer_norm_backward(
    axes: Axes,
    call: Call,
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: _Vector,
    *_: Any,
) -> _Gradients:
    dims, leading = _own_dims(x, shape)
    normal, given = (widen(x) - mean) * rstd, widen(grad)
    scaled = _affine(given, weight, None)
    if call.argument("output_mask")[0]:
        scaled = _differentiated(scaled, normal, rstd, dims, math.prod(shape), axes)[0]
    return _gradients(call, scaled, *(t.sum(leading) if leading else t for t in (given * normal, given)))


def _per_channel(call: Call) -> Factors:
    """Batch norm: images are `d0 d1 d2 ...` and vectors over channels `d1`."""
    backward = "backward" in call.op._schema.name
    image: TensorMeta = call.argument("input")
    names = dim_names(image.ndim)
    over = [name for i, name in enumerate(names) if i != 1]

    def place(meta: TensorMeta) -> str:
        return term(names) if meta.ndim == image.ndim else names[1] if meta.shape == image.shape[1:2] else "*"

    trains = _trains(call)
    return attrs.evolve(
        spell(call, map(place, call.operands), map(place, call.results)),
        reduce=dict.fromkeys(over, "sum") if backward and not trains else {},
        bodies=dict.fromkeys(over, _batch_norm_backward if backward else _batch_norm) if trains else {},
        independent=frozenset(names),
    )


def _trains(call: Call) -> bool:
    """Whether a batch norm uses the statistics of its input, not the running statistics."""
    names = {argument.name for argument in call.op._schema.arguments} & {"training", "train", "update"}
    return bool(call.argument(names.pop())) if names else "no_training" not in call.op._schema.name


def _over_channels(call: Call, x: Tensor) -> tuple[_Dims, int]:
    """All dims except the channels, and the number of elements per channel on all ranks."""
    dims = tuple(dim for dim in range(x.ndim) if dim != 1)
    return dims, math.prod(call.operands[0].shape[dim] for dim in dims)


def _batch_norm(axes: Axes, call: Call, x: Tensor, weight: _Vector, bias: _Vector, *args: Any) -> _Results:
    """Batch norm with statistics over all ranks.

    The results are the output, the mean, the inverse standard deviation and, if the call has them, running statistics.
    """
    eps, momentum = call.argument("eps"), call.argument("momentum")
    dims, count = _over_channels(call, x)
    normal, mean, invstd, variance = _normalized(widen(x), dims, count, eps, axes)
    results = [_affine(normal, _column(weight, x), _column(bias, x)), mean.flatten(), invstd.flatten()]
    if len(call.results) > 3:
        unbiased = variance.flatten() * (count / max(count - 1, 1))
        pairs = zip(args[:2], (results[1], unbiased), strict=True)
        running = [old * (1 - momentum) + new * momentum for old, new in pairs]
        results += [x.new_empty(meta.shape, dtype=meta.dtype) for meta in call.results[3:-2]] + running
    return _finished(call, *results)


def _batch_norm_backward(axes: Axes, call: Call, grad: Tensor, x: Tensor, weight: _Vector, *args: Any) -> _Gradients:
    mean, invstd = args[2], args[3]
    dims, count = _over_channels(call, x)
    inverse = _column(invstd, x)
    normal = (widen(x) - _column(mean, x)) * inverse
    dx, total, moment = _differentiated(widen(grad), normal, inverse, dims, count, axes)
    return _gradients(call, _affine(dx, _column(weight, x), None), moment.flatten(), total.flatten())


def _plain_gradients(_: Axes, call: Call, grad: Tensor, *args: Any) -> _Gradients:
    """The operator's gradients, or zeros if there are no elements, as torch's kernel divides by their number."""
    if grad.numel():
        return _gradients(call, *call.op(grad, *args[:-1], [True] * 3))
    return zero_results((), call, grad, *args)  # type: ignore[no-any-return]


def _own_groups(axes: Axes, call: Call, x: Tensor, weight: _Vector, bias: _Vector, *sizes: Any) -> Any:
    """The local implementation of group norm for a shard of the groups."""
    if not x.numel():
        return zero_results((), call, x, *(t for t in (weight, bias) if t is not None))
    _, channels, space, groups, eps = sizes
    return call.op(x, weight, bias, x.shape[0], x.shape[1], space, x.shape[1] * groups // channels, eps)


def _group_norm(axes: Axes, call: Call, x: Tensor, weight: _Vector, bias: _Vector, *sizes: Any) -> _Results:
    """The local implementation of group norm for a shard of each group's channels, or of a spatial dim."""
    _, channels, space, groups, eps = sizes
    grouped = widen(x).reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)
    normal, mean, rstd, _ = _normalized(grouped, (2,), channels // groups * space, eps, axes)
    result = _affine(normal.reshape(x.shape), _column(weight, x), _column(bias, x))
    return _finished(call, result, mean.squeeze(2), rstd.squeeze(2))


_CHANNELS = rule(_per_channel, _affine_rows, empty=empty_results)
_GROUPED = factors(
    "n (g c) ..., (g c), (g c) -> n (g c) ..., n g, n g",
    _affine_rows,
    bodies={"g": _own_groups, "c ...": _group_norm},
    size_argument=3,  # where `N`, the batch size, is an argument of its own
    empty=empty_results,
)


def _running(call: Call) -> Iterator[Row]:
    """New running statistics are weighted means of the old ones and those of the batch, so nondecreasing in the old."""
    if call.argument("training") and 0 <= call.argument("momentum") <= 1:
        yield from increasing("running_mean:3", "running_var:4")(call)


NORMALIZATION = table({
    "native_layer_norm": by_call(_layer),
    "native_layer_norm_backward": by_call(_layer_backward),
    "native_group_norm": _GROUPED,
    "native_batch_norm _native_batch_norm_legit.no_stats": _CHANNELS,
    "_native_batch_norm_legit_functional": rule(_per_channel, _affine_rows, _running, empty=empty_results),
    "_native_batch_norm_legit_no_training _batch_norm_with_update_functional": _CHANNELS,
    "native_batch_norm_backward": rule(
        _per_channel, linear("grad_out"), _scaled, _unread_statistics, empty=_plain_gradients
    ),
})  # fmt: skip
