"""Pooling, padding and resampling: batch and channels pass through, space is not cut."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from spmd.rules.builders import batched
from spmd.rules.notation import factors
from spmd.rules.partial import linear
from spmd.rules.rule import Rule

aten = torch.ops.aten


def _each(rule: Rule, *names: str) -> dict[torch._ops.OpOverload, Rule]:
    return {getattr(aten, name).default: rule for name in names}


def _spatial(space: int) -> dict[torch._ops.OpOverload, Rule]:
    """The operators on `space` trailing dims."""
    n, m = f"{space}", f"{space}d"
    forward, backward = batched(n, n, linear("self")), batched(f"{n} {n}", n, linear("grad_output"))
    found = _each(forward, f"reflection_pad{m}", f"replication_pad{m}")
    found |= _each(backward, f"reflection_pad{m}_backward", f"replication_pad{m}_backward")
    if space > 1:
        indexed = batched(n, f"{n} {n}")
        found |= _each(forward, f"avg_pool{m}", f"_adaptive_avg_pool{m}")
        found |= _each(backward, f"avg_pool{m}_backward", f"_adaptive_avg_pool{m}_backward")
        found |= _each(indexed, f"max_pool{m}_with_indices", f"adaptive_max_pool{m}")
        found |= _each(batched(f"{n} 1", f"{n} {n}"), f"fractional_max_pool{m}")
        backward = batched(f"{n} {n} {n}", n, linear("grad_output"))
        found |= _each(backward, *(f"{k}_pool{m}_backward" for k in ("adaptive_max", "fractional_max")))
        found |= _each(backward, f"max_pool{m}_with_indices_backward")
    return found


def _resampling() -> dict[torch._ops.OpOverload, Rule]:
    names = {
        1: ("upsample_linear1d", "upsample_nearest1d", "_upsample_nearest_exact1d"),
        2: (
            "upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest2d", "_upsample_nearest_exact2d",
            "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
        ),
        3: ("upsample_trilinear3d", "upsample_nearest3d", "_upsample_nearest_exact3d"),
    }  # fmt: skip
    found: dict[torch._ops.OpOverload, Rule] = {}
    for space, operators in names.items():
        found |= _each(batched(f"{space}", f"{space}", linear("self")), *operators)
        backward = batched(f"{space}", f"{space}", linear("grad_output"), size_argument=2)
        found |= _each(backward, *(f"{name}_backward" for name in operators))
    return found


POOLING: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        **_spatial(1),
        **_spatial(2),
        **_spatial(3),
        **_resampling(),
        aten.grid_sampler_2d.default: factors("n c _ _, n h w _ -> n c h w", linear("input")),
        aten.grid_sampler_3d.default: factors("n c _ _ _, n d h w _ -> n c d h w", linear("input")),
        aten.max_unpool2d.default: batched("2 2", "2", linear("self")),
        aten.max_unpool3d.default: batched("3 3", "3", linear("self")),
        aten.im2col.default: batched("3", "2", linear("self")),
        aten.col2im.default: batched("2", "3", linear("self")),
    }
)
