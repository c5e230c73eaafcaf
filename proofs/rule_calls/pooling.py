"""Small calls of pooling, padding and resampling, with and without a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

aten = torch.ops.aten
Calls: TypeAlias = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]

_generator = torch.Generator().manual_seed(3)
_SPACE = (6, 5, 4)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def call(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    return args, kwargs


def images(space: int, *rest: Any) -> list[tuple[Any, ...]]:
    """Arguments of a forward operator on images of `space` dims: with a batch, and without."""
    return [(f(*lead, *_SPACE[:space]), *rest) for lead in ((5, 3), (4,))]


def forward(space: int, *rest: Any) -> Calls:
    return [call(*args) for args in images(space, *rest)]


def backward(op: torch._ops.OpOverload, space: int, *rest: Any) -> Calls:
    """Calls of the backward operator of `op`, which takes the image after the gradient."""
    return [call(f(*op(*args).shape), *args) for args in images(space, *rest)]


def backward_by_position(op: torch._ops.OpOverload, space: int, *rest: Any) -> Calls:
    """Calls of the backward operator of an operator that also returns positions, which the backward takes last."""
    found = []
    for args in images(space, *rest):
        result, positions = op(*args)
        found.append(call(f(*result.shape), *args, positions))
    return found


def spelled(*options: Any) -> tuple[Any, ...]:
    """The options of average pooling, with those left out as the backward operator takes them."""
    return (*options, None)[:6]


def op(name: str) -> torch._ops.OpOverload:
    return getattr(aten, name).default


def pads(space: int) -> dict[torch._ops.OpOverload, Calls]:
    found: dict[torch._ops.OpOverload, Calls] = {}
    for name in (f"reflection_pad{space}d", f"replication_pad{space}d"):
        paddings = [1, 2] * space, [*[0, 0] * (space - 1), 2, 1]
        found |= {
            op(name): [made for padding in paddings for made in forward(space, padding)],
            op(f"{name}_backward"): [made for padding in paddings for made in backward(op(name), space, padding)],
        }
    return found


def pools(space: int) -> dict[torch._ops.OpOverload, Calls]:
    n = f"{space}d"
    average = [2] * space, [2] * space, [1] * space, True, False, None
    largest = [2] * space, [1] * space, [0] * space, [1] * space, False
    sizes = [2] * space
    # Padding, strides that leave out rows, kernels that reach beyond the image, dilation.
    averages = [
        average,
        ([3] * space, [], [1] * space, False, True),
        ([2] * space, [3] * space, [1] * space, True, False),
        ([3, 2, 1][:space], [2, 1, 1][:space], [1, 1, 0][:space], True, True, 5),
    ]
    maxima = [
        largest,
        ([3] * space, [2] * space, [1] * space, [1] * space, True),
        ([2] * space, [], [1] * space, [3, 2, 2][:space]),
    ]
    fractional = [
        (f(*lead, *_SPACE[:space]), sizes, sizes, f(samples, 3, space).sigmoid())
        for lead, samples in (((5, 3), 5), ((3,), 1), ((3,), 2))
    ]
    chosen = [(args, op(f"fractional_max_pool{n}")(*args)) for args in fractional]
    return {
        op(f"avg_pool{n}"): [made for options in averages for made in forward(space, *options)],
        op(f"avg_pool{n}_backward"): [
            made for options in averages for made in backward(op(f"avg_pool{n}"), space, *spelled(*options))
        ],
        op(f"_adaptive_avg_pool{n}"): forward(space, sizes),
        op(f"_adaptive_avg_pool{n}_backward"): [
            call(f(*args[0].shape[:-space], *sizes), args[0]) for args in images(space)
        ],
        op(f"max_pool{n}_with_indices"): [
            *(made for options in maxima for made in forward(space, *options)),
            *(call(torch.full_like(x, -torch.inf), *options) for options in maxima for x, *_ in images(space)),
        ],
        op(f"max_pool{n}_with_indices_backward"): [
            made
            for options in maxima
            for made in backward_by_position(op(f"max_pool{n}_with_indices"), space, *(*options, False)[:5])
        ],
        op(f"adaptive_max_pool{n}"): forward(space, sizes),
        op(f"adaptive_max_pool{n}_backward"): [
            call(f(*args[0].shape[:-space], *sizes), args[0], op(f"adaptive_max_pool{n}")(args[0], sizes)[1])
            for args in images(space)
        ],
        op(f"fractional_max_pool{n}"): [call(*args) for args in fractional],
        op(f"fractional_max_pool{n}_backward"): [
            call(f(*result.shape), args[0], sizes, sizes, positions) for args, (result, positions) in chosen
        ],
    }


def resampling(name: str, space: int, *rest: Any) -> dict[torch._ops.OpOverload, Calls]:
    """Calls that enlarge some dims and reduce others, without scales and with scales other than the sizes' ratios."""
    image = (5, 3, *_SPACE[:space])
    asked = [([7, 3, 5][:space], ()), ([2, 9, 4][:space], ()), ([8, 7, 5][:space], (1.4, 1.3, 1.3)[:space])]
    return {
        op(name): [call(f(*image), sizes, *rest, *scales) for sizes, scales in asked],
        op(f"{name}_backward"): [call(f(5, 3, *sizes), sizes, list(image), *rest, *scales) for sizes, scales in asked],
    }


def together(*calls: dict[torch._ops.OpOverload, Calls]) -> dict[torch._ops.OpOverload, Calls]:
    return {op: [made for found in calls for made in found[op]] for op in calls[0]}


POOLING: Mapping[torch._ops.OpOverload, Calls] = {
    **pads(1),
    **pads(2),
    **pads(3),
    **pools(2),
    **pools(3),
    **resampling("upsample_linear1d", 1, False),
    **resampling("upsample_nearest1d", 1),
    **resampling("_upsample_nearest_exact1d", 1),
    **together(resampling("upsample_bilinear2d", 2, True), resampling("upsample_bilinear2d", 2, False)),
    **resampling("upsample_bicubic2d", 2, False),
    **resampling("upsample_nearest2d", 2),
    **resampling("_upsample_nearest_exact2d", 2),
    **resampling("_upsample_bilinear2d_aa", 2, False),
    **resampling("_upsample_bicubic2d_aa", 2, False),
    **resampling("upsample_trilinear3d", 3, False),
    **resampling("upsample_nearest3d", 3),
    **resampling("_upsample_nearest_exact3d", 3),
    aten.grid_sampler_2d.default: [call(f(5, 3, 4, 4), f(5, 2, 3, 2).tanh(), 0, 0, False)],
    aten.grid_sampler_3d.default: [call(f(5, 3, 4, 4, 3), f(5, 2, 3, 2, 3).tanh(), 0, 0, False)],
    aten.im2col.default: [call(f(5, 3, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1])],
    aten.col2im.default: [call(f(5, 12, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])],
}
