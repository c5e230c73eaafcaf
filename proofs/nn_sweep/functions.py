"""Calls of the public functions that torch's operator database lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from proofs.nn_sweep.call import Call, call
from proofs.nn_sweep.draws import positive, real

Make = Callable[[], Call]


def _in_place(function: Callable[..., torch.Tensor], *rest: Any) -> list[Make]:
    """Calls on a copy, whose value is the copy after the call."""

    def written(x: torch.Tensor) -> torch.Tensor:
        copy = x.clone()
        function(copy, *rest)
        return copy

    return [lambda: call(written, real(5, 6)), lambda: call(written, real(8))]


def _pools(function: Callable[..., Any], dims: int, *args: Any, **kwargs: Any) -> list[Make]:
    shape = (8, 7, 6)[:dims]
    with_options = lambda x: function(x, *args, **kwargs)  # noqa: E731
    return [lambda: call(with_options, real(5, 3, *shape)), lambda: call(with_options, real(4, *shape))]


def _of_two(function: Callable[..., torch.Tensor]) -> list[Make]:
    return [lambda: call(function, positive(5, 6), positive(5, 6)), lambda: call(function, positive(8), positive(5, 1))]


def _affine_grid() -> list[Make]:
    return [
        lambda: call(lambda theta: F.affine_grid(theta, [5, 2, 4, 3], align_corners=False), real(5, 2, 3)),
        lambda: call(lambda theta: F.affine_grid(theta, [4, 2, 3, 4, 2], align_corners=True), real(4, 3, 4)),
    ]


def _grouped_mm() -> list[Make]:
    half = lambda *shape: real(*shape).bfloat16()  # noqa: E731
    return [
        lambda: call(F.grouped_mm, half(4, 16, 16), half(4, 16, 32)),
        lambda: call(
            lambda left, right, ends: F.grouped_mm(left, right, offs=ends),
            half(32, 16),
            half(4, 16, 32),
            torch.tensor([8, 8, 24, 32], dtype=torch.int32),
        ),
    ]


def _scaled(function: Callable[..., torch.Tensor], left: tuple[int, ...], right: tuple[int, ...]) -> list[Make]:
    kind = F.ScalingType.TensorWise

    def product(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
        a, b = a.to(torch.float8_e4m3fn), b.mT.to(torch.float8_e4m3fn).mT
        return function(a, b, scale_a, kind, scale_b, kind)

    scale = lambda: torch.rand(()) + 0.5  # noqa: E731
    return [lambda: call(product, real(*left), real(*right), scale(), scale())]


CALLS: Mapping[str, Sequence[Make]] = MappingProxyType(
    {
        **{
            f"nn.functional.adaptive_max_pool{n}d_with_indices": _pools(
                getattr(F, f"adaptive_max_pool{n}d_with_indices"), n, (3, 2, 4)[:n]
            )
            for n in (1, 2, 3)
        },
        **{
            f"nn.functional.max_pool{n}d_with_indices": _pools(
                getattr(F, f"max_pool{n}d_with_indices"), n, 3, 2, padding=1
            )
            for n in (1, 2, 3)
        },
        **{
            f"nn.functional.fractional_max_pool{n}d_with_indices": _pools(
                getattr(F, f"fractional_max_pool{n}d_with_indices"), n, 2, output_ratio=(0.5,) * n
            )
            for n in (2, 3)
        },
        **{f"nn.functional.lp_pool{n}d": _pools(getattr(F, f"lp_pool{n}d"), n, 2.0, 3, 2) for n in (1, 2, 3)},
        "nn.functional.affine_grid": _affine_grid(),
        "nn.functional.celu_": _in_place(F.celu_, 0.7),
        "nn.functional.elu_": _in_place(F.elu_, 0.7),
        "nn.functional.hardtanh_": _in_place(F.hardtanh_),
        "nn.functional.leaky_relu_": _in_place(F.leaky_relu_, 0.1),
        "nn.functional.relu_": _in_place(F.relu_),
        "nn.functional.rrelu_": [*_in_place(F.rrelu_), *_in_place(F.rrelu_, 0.1, 0.3, True)],
        "nn.functional.selu_": _in_place(F.selu_),
        "nn.functional.threshold_": _in_place(F.threshold_, 0.1, 0.5),  # type: ignore[attr-defined]
        "nn.functional.conv_tbc": [lambda: call(F.conv_tbc, real(7, 5, 4), real(3, 4, 6), real(6), 1)],
        "nn.functional.dropout1d": [
            lambda: call(lambda x: F.dropout1d(x, 0.4), real(5, 6, 4)),
            lambda: call(lambda x: F.dropout1d(x, 0.4, training=False), real(5, 6, 4)),
        ],
        "nn.functional.fold": [
            lambda: call(lambda x: F.fold(x, (4, 5), (2, 3), padding=1, stride=2), real(5, 18, 9)),
            lambda: call(lambda x: F.fold(x, (4, 5), (2, 2)), real(8, 12)),
        ],
        "nn.functional.grouped_mm": _grouped_mm(),
        "nn.functional.scaled_mm": _scaled(F.scaled_mm, (16, 32), (32, 16)),
        "nn.functional.scaled_grouped_mm": _scaled(
            F.scaled_grouped_mm,  # type: ignore[attr-defined]
            (4, 16, 32),
            (4, 32, 16),
        ),
        "nn.functional.gumbel_softmax": [
            lambda: call(lambda x: F.gumbel_softmax(x, tau=0.7), real(5, 6)),
            lambda: call(lambda x: F.gumbel_softmax(x, hard=True, dim=0), real(5, 6)),
        ],
        "nn.functional.native_channel_shuffle": [
            lambda: call(lambda x: F.native_channel_shuffle(x, 2), real(5, 6, 3, 4)),
        ],
        "nn.functional.upsample": [
            lambda: call(lambda x: F.upsample(x, scale_factor=2), real(5, 3, 4)),
            lambda: call(lambda x: F.upsample(x, size=(5, 7), mode="bilinear"), real(5, 3, 4, 4)),
        ],
        "fft.fftfreq": [lambda: call(lambda x: x * torch.fft.fftfreq(6, 0.5, dtype=torch.float64), real(5, 6))],
        "fft.rfftfreq": [lambda: call(lambda x: x * torch.fft.rfftfreq(6, 0.5, dtype=torch.float64), real(5, 4))],
        "special.gammainc": _of_two(torch.special.gammainc),
        "special.gammaincc": _of_two(torch.special.gammaincc),
    }
)
"""The calls by full name of the function."""
