"""The operator that keeps a second computation of a value apart from the first: an optimization barrier, as in JAX."""

from __future__ import annotations

import torch

torch.library.define("spmd::recompute", "(Tensor(a) x, int number) -> Tensor(a)")

RECOMPUTE: torch._ops.OpOverload = torch.ops.spmd.recompute.default
"""`recompute(x, number)`: `x`, for a computation that runs again. What is computed from calls with different numbers,
or without one, is not a common subexpression."""


@torch.library.impl("spmd::recompute", "CompositeExplicitAutograd")
def _same(x: torch.Tensor, number: int) -> torch.Tensor:
    return torch.ops.aten.alias.default(x)
