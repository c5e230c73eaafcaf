"""Mutants of derivatives: of sharding operators, and of collectives."""

from __future__ import annotations

from typing import Any

import torch

from proofs.fuzz.mutants.mutant import Patch, mutant
from proofs.fuzz.pool import pending, steered
from spmd.tracing import constrain

_PLACED = " ".join(["constrain", "reshard", *pending.OPERATORS, *steered.OPERATORS])
_Constrained = constrain._Constrained


def _doubled(rule: Any) -> staticmethod:
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return 2 * rule.__func__(ctx, grad)[0], None, None

    return staticmethod(backward)


MUTANTS = (
    mutant(
        "transpose: constrain and reshard",
        "the cotangent of a placed value counts twice",
        Patch(_Constrained, "backward", _doubled),
        within=_PLACED,
    ),
    mutant(
        "tangent: constrain and reshard",
        "the tangent of a placed value is zero",
        Patch(_Constrained, "jvp", lambda rule: staticmethod(lambda ctx, tangent, *_: torch.zeros_like(tangent))),
        within=_PLACED,
    ),
)
