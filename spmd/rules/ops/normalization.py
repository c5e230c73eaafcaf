"""Layer, group and batch norm, also over a sharded dim that is normalized: ranks then sum what its statistics are."""

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
from spmd.rules.builders import asked, dim_names, nothing, rule, vanish
from spmd.rules.notation import by_call, factors, spell, term
from spmd.rules.ops.reductions import widen
from spmd.rules.partial import ignores, increasing, linear
from spmd.rules.rule import Axes, Factors, Row, Rule, table

_Dims: TypeAlias = tuple[int, ...]
_Vector: TypeAlias = Tensor | None
_Results: TypeAlias = tuple[Tensor, ...]
_Gradients: TypeAlias = tuple[Tensor | None, ...]


def _affine_rows(call: Call) -> Iterator[Row]:
    """The result is linear in weight and bias together, and nowhere decreasing in the bias."""
    yield from linear("weight bias:0")(call) if call.argument("weight") is not None else ()
    yield from increasing("bias:0")(call)


def _scaled(call: Call) -> Iterator[Row]:
    """The gradient of the input is linear in the weight, and the others do not read it."""
    yield from (linear("weight:0") if call.argument("output_mask")[0] else ignores("weight"))(call)


def _normalized(x: Tensor, dims: _Dims, count: int, eps: float, axes: Axes) -> tuple[Tensor, ...]:
    """`x` normalized over `dims` (`count` elements on all ranks), the mean, inverse deviation and variance there."""
    mean = psum(x.sum(dims, keepdim=True), axes) / count
    centered = x - mean
    variance = psum((centered * centered).sum(dims, keepdim=True), axes) / count
    inverse = (variance + eps).rsqrt()
    return centered * inverse, mean, inverse, variance


def _differentiated(
    grad: Tensor, normal: Tensor, inverse: Tensor, dims: _Dims, count: int, axes: Axes
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of what was normalized, and the sums over `dims` of `grad`, and of that times `normal`."""
    sums = torch.stack([t.sum(dims, keepdim=True) for t in (grad, grad * normal)])
    total, moment = psum(sums, axes).unbind()
    return inverse * (grad - total / count - normal * (moment / count)), total, moment


def _affine(x: Tensor, weight: _Vector, bias: _Vector) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _finished(call: Call, *results: Tensor) -> _Results:
    return tuple(result.to(meta.dtype) for result, meta in zip(results, call.results, strict=True))


def _gradients(call: Call, *gradients: Tensor) -> _Gradients:
    """Of the gradients of input, weight and bias, those that the call asks for, in the dtypes that it gives them."""
    metas = iter(call.results)
    return tuple(None if x is None else x.to(next(metas).dtype) for x in asked(call, *gradients))


def _column(vector: _Vector, x: Tensor) -> Any:
    """A value for each channel, shaped to meet images `x`."""
    return None if vector is None else vector.view(-1, *(1,) * (x.ndim - 2))


def _terms(call: Call) -> tuple[str, str, str, str]:
    """Of an operator on the trailing dims: the terms of its input, its statistics, its parameters; the leading dims."""
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
    results = ", ".join(result for result in asked(call, x, parameter, parameter) if result is not None)
    pattern = f"{x}, {x}, {statistic}, {statistic}, {parameter}, {parameter} -> {results}"
    return factors(
        pattern, linear("grad_out"), _scaled, ignores("bias"), sum=leading, bodies={parameter: _layer_norm_backward}
    )


def _own_dims(x: Tensor, shape: list[int]) -> tuple[_Dims, _Dims]:
    """The dims that are normalized, and those before."""
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
    """Batch norm: images `d0 d1 ...` and vectors of channels `d1`."""
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
    """Whether a batch norm takes the statistics of its input, not the running ones."""
    names = {argument.name for argument in call.op._schema.arguments} & {"training", "train", "update"}
    return bool(call.argument(names.pop())) if names else "no_training" not in call.op._schema.name


def _over_channels(call: Call, x: Tensor) -> tuple[_Dims, int]:
    """The dims that are not channels, and how many elements a channel has on all ranks."""
    dims = tuple(dim for dim in range(x.ndim) if dim != 1)
    return dims, math.prod(call.operands[0].shape[dim] for dim in dims)


def _batch_norm(axes: Axes, call: Call, x: Tensor, weight: _Vector, bias: _Vector, *args: Any) -> _Results:
    """With statistics over all ranks: the result, the mean, the inverse deviation, and running statistics if asked."""
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
    """Zeros where there are no elements: torch's kernel divides by their number."""
    if grad.numel():
        return _gradients(call, *call.op(grad, *args[:-1], [True] * 3))
    return nothing((), call, grad, *args)  # type: ignore[no-any-return]


def _own_groups(axes: Axes, call: Call, x: Tensor, weight: _Vector, bias: _Vector, *sizes: Any) -> Any:
    """Group norm of some of the groups."""
    if not x.numel():
        return nothing((), call, x, *(t for t in (weight, bias) if t is not None))
    _, channels, space, groups, eps = sizes
    return call.op(x, weight, bias, x.shape[0], x.shape[1], space, x.shape[1] * groups // channels, eps)


def _group_norm(axes: Axes, call: Call, x: Tensor, weight: _Vector, bias: _Vector, *sizes: Any) -> _Results:
    """Group norm of some channels of every group, or some of the space."""
    _, channels, space, groups, eps = sizes
    grouped = widen(x).reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)
    normal, mean, rstd, _ = _normalized(grouped, (2,), channels // groups * space, eps, axes)
    result = _affine(normal.reshape(x.shape), _column(weight, x), _column(bias, x))
    return _finished(call, result, mean.squeeze(2), rstd.squeeze(2))


_CHANNELS = rule(_per_channel, _affine_rows, empty=vanish)
_GROUPED = factors(
    "n (g c) ..., (g c), (g c) -> n (g c) ..., n g, n g",
    _affine_rows,
    bodies={"g": _own_groups, "c ...": _group_norm},
    size_argument=3,  # the operator takes the sizes of its input apart
    empty=vanish,
)


def _running(call: Call) -> Iterator[Row]:
    """Running statistics move towards those of the batch, which do not depend on them."""
    if call.argument("training") and 0 <= call.argument("momentum") <= 1:
        yield from increasing("running_mean:3", "running_var:4")(call)


NORMALIZATION = table({
    "native_layer_norm": by_call(_layer),
    "native_layer_norm_backward": by_call(_layer_backward),
    "native_group_norm": _GROUPED,
    "native_batch_norm _native_batch_norm_legit.no_stats": _CHANNELS,
    "_native_batch_norm_legit_functional": rule(_per_channel, _affine_rows, _running, empty=vanish),
    "_native_batch_norm_legit_no_training _batch_norm_with_update_functional": _CHANNELS,
    "native_batch_norm_backward": rule(_per_channel, linear("grad_out"), _scaled, empty=_plain_gradients),
})  # fmt: skip
