"""Convolution and its gradients, sharded over the batch, channels, groups, or a spatial dim (with halo exchange)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.ir.call import Call
from spmd.rules.builders import requested
from spmd.rules.nested import Along, Inner
from spmd.rules.notation import by_call, factors
from spmd.rules.ops.halo import Halo
from spmd.rules.ops.one_dim import cropped, not_empty, resized
from spmd.rules.partial import ignores, increasing, linear
from spmd.rules.rule import Axes, Row, Rule, table

aten = torch.ops.aten

_Gradients: TypeAlias = tuple[Tensor | None, ...]


def _terms(call: Call) -> tuple[str, str, str, str]:
    """The terms of image, weight, result and bias; with several groups `g`, channels are `(g c)` or `(g o)`."""
    space = " _" * (call.operands[0].ndim - 2)
    inner, outer = ("c", "o") if call.argument("groups") == 1 else ("(g c)", "(g o)")
    weight = f"{inner} o" if call.argument("transposed") else f"{outer} c"
    return f"n {inner}{space}", f"{weight}{space}", f"n {outer}{space}", outer


def _convolution(call: Call) -> Rule:
    image, weight, result, bias = _terms(call)
    rows = (linear("input bias", "weight bias"), increasing("bias"), _cut_space)
    return factors(f"{image}, {weight}, {bias} -> {result}", *rows, sum="c", additive="bias", bodies={"g": _forward})


def _convolution_backward(call: Call) -> Rule:
    image, weight, result, bias = _terms(call)
    results = ", ".join(term for term in requested(call, image, weight, bias) if term)
    pattern = f"{result}, {image}, {weight} -> {results}"
    rows = (_linear_backward, _cut_space_backward)
    # The bias gradient does not depend on the factor c: where c is sharded, every rank computes all of it.
    return factors(pattern, *rows, sum="n o", independent="c", bodies={"g": _backward})


def _linear_backward(call: Call) -> Iterator[Row]:
    """The image's gradient is bilinear in `grad_output` and weight, the weight's in `grad_output` and image."""
    positions = [sum(call.argument("output_mask")[:i]) for i in range(2)]
    image, weight = call.argument("output_mask")[:2]
    yield from linear("grad_output")(call)
    yield from (linear(f"input:{positions[1]}") if weight else ignores("input"))(call)
    yield from (linear("weight:0") if image else ignores("weight"))(call)
    if image and weight:
        yield from linear("input weight:0 1")(call)


def _least(x: Tensor, *first: int) -> Tensor:
    """`x` with its empty dims padded by zeros, the first ones to the lengths `first`, others to 1."""
    return not_empty(x, {dim: first[dim] if dim < len(first) else 1 for dim in range(x.ndim)})


def _cropped(x: Tensor, shape: Sequence[int], dims: Sequence[int] | None = None) -> Tensor:
    return cropped(x, {dim: shape[dim] for dim in (range(x.ndim) if dims is None else dims)})


def _channels(weight: Tensor, options: Sequence[Any]) -> tuple[int, int]:
    """The number of channels that an image, and a result, are padded to if they have none."""
    groups, inner = options[-1], options[-1] * max(weight.shape[1], 1)
    return (groups, inner) if options[3] else (inner, groups)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """The operator on tensors whose batch or channels may be empty; an empty result may come out padded."""
    inner, outer = _channels(weight, options)
    bias = None if bias is None else _least(bias, outer)
    return aten.convolution.default(_least(x, 1, inner), _least(weight, options[-1]), bias, *options)  # type: ignore[no-any-return]


def _differentiate(grad: Tensor, x: Tensor, weight: Tensor, options: Sequence[Any], mask: Sequence[bool]) -> _Gradients:
    """The gradients for tensors whose batch or channels may be empty; empty gradients may come out padded."""
    inner, outer = _channels(weight, options)
    given = (_least(grad, 1, outer), _least(x, 1, inner), _least(weight, options[-1]))
    return aten.convolution_backward.default(*given, [given[0].shape[1]], *options, mask)  # type: ignore[no-any-return]


def _grouped(options: Sequence[Any], channels: int, weight: Tensor) -> list[Any]:
    """The options with this rank's number of groups: its `channels` divided by those of one group.

    A rank that holds no channels of a group has nothing to convolve: one group is as good as several.
    """
    return [*options[:-1], max(channels // weight.shape[1], 1) if weight.shape[1] else 1]


def _forward(axes: Axes, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """The local implementation without communication: for a shard of the groups, and for empty operands."""
    (result,) = call.results
    channels = result.shape[1] if options[3] else x.shape[1]
    return _cropped(_convolve(x, weight, bias, *_grouped(options, channels, weight)), result.shape)


def _backward(axes: Axes, call: Call, grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> _Gradients:
    """The local implementation without communication: for a shard of the groups or channels, and for empty operands."""
    _, *options, mask = args
    channels = grad.shape[1] if options[3] else x.shape[1]
    found = _differentiate(grad, x, weight, _grouped(options, channels, weight), mask)
    shapes = x.shape, weight.shape, grad.shape[1:2]
    return requested(call, *(y if y is None else _cropped(y, shape) for y, shape in zip(found, shapes, strict=True)))


def _halo(call: Call, dim: int, axes: Axes) -> Halo:
    """The halo of image and result along `dim`; the small side is the result, or the image if transposed."""
    pick = lambda name: (call.argument(name) * dim)[0 if len(call.argument(name)) == 1 else dim - 2]  # noqa: E731
    image, weight = (call.operands[call.operands.index(call.argument(name))] for name in ("input", "weight"))
    stride, padding, reach = pick("stride"), pick("padding"), (weight.shape[dim] - 1) * pick("dilation")
    length = image.shape[dim]
    if call.argument("transposed"):
        large = (length - 1) * stride - 2 * padding + reach + pick("output_padding") + 1
        return Halo(dim, axes, length, large, stride, padding, reach)
    return Halo(dim, axes, (length + 2 * padding - reach - 1) // stride + 1, length, stride, padding, reach)


def _unpadded(options: Sequence[Any], dim: int, space: int) -> list[Any]:
    """The options without padding in `dim`, for a large side that already has all rows of the windows."""
    stride, padding, dilation, transposed, output_padding, groups = options
    padding, output_padding = (list(x) * (space if len(x) == 1 else 1) for x in (padding, output_padding))
    padding[dim - 2] = output_padding[dim - 2] = 0
    return [stride, padding, dilation, transposed, output_padding, groups]


def _forward_along(
    axes: Axes, call: Call, inner: Inner, dim: int, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> Tensor:
    """The convolution with `dim` of image and result sharded."""
    halo, result = _halo(call, dim, axes), call.results[0].shape
    convolve = _convolve if inner is call.op else inner
    local, cut = _unpadded(options, dim, x.ndim - 2), (0, 1, dim)
    if not call.argument("transposed"):
        return _cropped(convolve(halo.gather(x, max(result[dim], 1)), weight, bias, *local), result, cut)
    y = _cropped(halo.scatter(convolve(x, weight, None, *local), result[dim]), result, cut)
    return y if bias is None else y + bias.view(-1, *(1,) * (x.ndim - 2))


def _backward_along(
    axes: Axes, call: Call, inner: Inner, dim: int, grad: Tensor, x: Tensor, weight: Tensor, *args: Any
) -> _Gradients:
    """The gradients with `dim` of image and result sharded; weight and bias get Partial."""
    halo = _halo(call, dim, axes)
    sizes, *options, mask = args
    local = _unpadded(options, dim, x.ndim - 2)

    def differentiate(grad: Tensor, x: Tensor) -> _Gradients:
        if inner is call.op:
            return _differentiate(grad, x, weight, local, [*mask[:2], False])
        return inner(grad, x, weight, sizes, *local, mask)

    if call.argument("transposed"):
        dx, dw, _ = differentiate(halo.gather(grad, max(x.shape[dim], 1)), x)
    else:
        rows = max(grad.shape[dim], 1)
        # Only the weight's gradient reads the image: of others, its shape counts.
        window = halo.gather(x, rows) if mask[1] else x.new_empty(resized(x.shape, dim, halo.length(rows)))
        dx, dw, _ = differentiate(grad, window)
        dx = halo.scatter(dx, x.shape[dim]) if dx is not None and mask[0] else None
    bias = grad.sum([dim for dim in range(grad.ndim) if dim != 1])
    dx = dx if dx is None else _cropped(dx, x.shape, (0, 1, dim))
    return requested(call, dx, dw if dw is None else _cropped(dw, weight.shape), bias)


def _cut_space(call: Call) -> Iterator[Row]:
    for dim in range(2, call.operands[0].ndim):
        replicated = (Replicate(),) * (len(call.operands) - 1)
        yield Row((Shard(dim), *replicated), (Shard(dim),), Along(dim, _forward_along))


def _cut_space_backward(call: Call) -> Iterator[Row]:
    for dim in range(2, call.operands[0].ndim):
        placed: tuple[Placement, ...] = (Shard(dim), Partial("sum"), Partial("sum"))
        results = tuple(placement for placement in requested(call, *placed) if placement is not None)
        yield Row((Shard(dim), Shard(dim), Replicate()), results, Along(dim, _backward_along))


CONVOLUTION = table({
    "convolution": by_call(_convolution, empty=_forward),
    "convolution_backward": by_call(_convolution_backward, empty=_backward),
})  # fmt: skip
