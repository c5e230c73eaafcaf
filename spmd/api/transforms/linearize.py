"""torch.func.linearize of functions of DTensors, and of functions that call jitted ones.

Torch has no hook there, so the two steps of `linearize`, recording the derivative and folding its constants, are
replaced by ones that leave all other functions to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms

from spmd.api.values.dtensor import DTensor
from spmd.tracing.linearize import RecordingError, evaluated_anew
from spmd.tracing.running import is_tracing

_steps: Any = eager_transforms
_step, _make_fx, _split = _steps.lazy_dynamo_disallow, _steps.make_fx, _steps.const_fold.split_const_subgraphs


def _recorded_or_evaluated(derivative: Callable[[tuple[torch.Tensor, ...]], Any]) -> Callable[..., Any]:
    """As `make_fx(derivative)`; a function that evaluates it where DTensors take part, or a function is traced."""

    def made(tangents: tuple[torch.Tensor, ...]) -> Any:
        if not is_tracing() and not any(isinstance(tangent, DTensor) for tangent in tangents):
            try:
                return _step(_make_fx)(derivative)(tangents)
            except RecordingError:
                pass
        return evaluated_anew(derivative)(tangents)

    return made


def _folded(derivative: Any) -> Any:
    return _step(_split)(derivative) if isinstance(derivative, torch.fx.GraphModule) else derivative


def linearize_dtensors() -> None:
    """Replace the steps of `linearize`."""
    replaced = {_make_fx: _recorded_or_evaluated, _split: _folded}
    _steps.lazy_dynamo_disallow = lambda step: replaced.get(step) or _step(step)
