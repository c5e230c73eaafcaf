"""Other values for the operands of a call: a row that is right for all of them is not right by chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from torch import Tensor

from spmd.testing.rule_check.execute import FAILURES, Example


@attrs.frozen
class _Version:
    """How operands are redrawn.

    Args:
        scale: from normally distributed floats to the values of floats.
        rate: the share of True among booleans.
        positions: whether integers, which may be positions, are redrawn.
    """

    scale: Callable[[Tensor], Tensor]
    rate: float
    positions: bool


def _whole(normal: Tensor) -> Tensor:
    return normal.mul(2).round() if normal.is_floating_point() else normal


def _wide(normal: Tensor) -> Tensor:
    return normal.mul(320).round().div(64) if normal.is_floating_point() else normal  # 64ths: their sums do not round


_SCALES: Sequence[Callable[[Tensor], Tensor]] = (_wide, torch.sigmoid, _whole)
"""Arbitrary values; values between 0 and 1, as some operators have finite results only there; and small integers, with
zeros and ties."""

_VERSIONS = [
    _Version(scale, rate, positions)
    for positions, rates in ((True, (0.5, 0.0, 1.0)), (False, (0.5,)))
    for rate in rates
    for scale in _SCALES
]


def redrawn(example: Example) -> Iterator[Example]:
    """The call with other values, for which the operator returns finite results of the same shapes and dtypes."""
    for seed, version in enumerate(_VERSIONS):
        generator = torch.Generator().manual_seed(seed)
        try:
            tensors = [_draw(tensor, version, generator, example.checked) for tensor in example.tensors]
            args, kwargs = example.arguments(tensors)
            again = Example.of(example.call.op, args, kwargs, checked=example.checked)
        except FAILURES:
            continue
        finite = all(bool(result.isfinite().all()) for result in again.results)
        if finite and again.call.results == example.call.results:
            yield again


def _draw(tensor: Tensor, version: _Version, generator: torch.Generator, checked: bool) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return version.scale(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
    if tensor.dtype == torch.bool:
        one = 1 / max(tensor.numel(), 2)  # at least about one element differs
        return torch.rand(tensor.shape, generator=generator) < min(max(version.rate, one), 1 - one)
    if not (checked and version.positions and tensor.numel()):
        return tensor
    low, high = int(tensor.min()), int(tensor.max())
    return torch.randint(low, high + 1, tensor.shape, generator=generator, dtype=tensor.dtype)
