"""Other values for the operands of a call: what is right for all of them is not right by chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from torch import Tensor

from spmd.rules.check.execute import FAILURES, Example


@attrs.frozen
class _Version:
    """How values are drawn: floats by `scale` from normal ones, conditions at about a rate, positions anew or kept."""

    scale: Callable[[Tensor], Tensor]
    rate: float
    positions: bool


def _whole(normal: Tensor) -> Tensor:
    return normal.mul(2).round() if normal.is_floating_point() else normal


def _wide(normal: Tensor) -> Tensor:
    return normal.mul(320).round().div(64) if normal.is_floating_point() else normal  # sums are then without rounding


_SCALES: Sequence[Callable[[Tensor], Tensor]] = (_wide, torch.sigmoid, _whole)
"""Any values, positive ones below 1 (where others give no numbers), and few whole ones, with zeros and ties."""

_VERSIONS = [
    _Version(scale, rate, positions)
    for positions, rates in ((True, (0.5, 0.0, 1.0)), (False, (0.5,)))
    for rate in rates
    for scale in _SCALES
]


def redrawn(example: Example) -> Iterator[Example]:
    """The call with other values, as long as the operator takes them and gives numbers for them."""
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
        one = 1 / max(tensor.numel(), 2)  # about one is another than the rest
        return torch.rand(tensor.shape, generator=generator) < min(max(version.rate, one), 1 - one)
    if not (checked and version.positions and tensor.numel()):
        return tensor
    low, high = int(tensor.min()), int(tensor.max())
    return torch.randint(low, high + 1, tensor.shape, generator=generator, dtype=tensor.dtype)
