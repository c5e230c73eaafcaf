"""`torch.nn.init.trunc_normal_` by a key: of fractions, where torch draws again until all numbers are in range."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import init

from spmd.errors import TraceError
from spmd.tracing.draw_scopes import draw_scope
from spmd.tracing.source import where

_by_rejection = init._no_grad_trunc_normal_


def _truncated_normal(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> Any:
    """The quantiles of uniform fractions between those of the ends."""
    if draw_scope() is None:
        try:
            return _by_rejection(tensor, mean, std, a, b, generator=generator)
        except TraceError as error:
            raise TraceError(
                f"torch.nn.init.trunc_normal_ at {where()} draws again until all numbers are in range: how often, only "
                'their values say. With rng="counter" a program draws once: spmd.jit(..., rng="counter").'
            ) from error
    root = math.sqrt(2)
    low, high = (math.erf((end - mean) / std / root) for end in (a, b))
    with torch.no_grad():
        drawn = torch.empty_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
        drawn = drawn.uniform_(low, high, generator=generator).erfinv().mul(std * root).add(mean).clamp(a, b)
        return tensor.copy_(drawn)


# Once, and not in each trace: other threads may initialize meanwhile.
init._no_grad_trunc_normal_ = _truncated_normal
