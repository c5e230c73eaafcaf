"""Calls whose inputs are not contiguous, through `spmd.jit` as users call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from spmd.errors import TraceError
from spmd.jit import jit
from spmd.mesh import Mesh
from spmd.spec import P
from spmd.testing.nn_sweep.call import SEED, Role, Trial
from spmd.testing.op_sweep.outcome import Outcome, Status
from spmd.testing.op_sweep.placements import apart


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.ndim > 1 else tensor


def _sliced(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if tensor.ndim > 2 else tensor


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand_as(tensor)


MEMORY: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"transposed": _transposed, "sliced": _sliced, "expanded": _expanded, "channels last": _channels_last}
)
"""The same shapes, otherwise in memory; parameters are only changed to channels-last, as `Module.to` does."""


def sweep_memory(trial: Trial, mesh: Mesh, outcome: Outcome) -> None:
    """Run a call with tensors otherwise in memory, replicated and with a sharded batch."""
    outcome.calls += 1
    for name, tensors in _otherwise(trial):
        label = f"{trial.case.label}: {name}"
        try:
            expected = _run(trial.case.function, tensors)
        except Exception as error:  # whatever plain torch does, there is nothing to compare with
            outcome.note(Status.SKIPPED, f"{label}: {type(error).__name__}: {error}")
            continue
        for batch in (P(), P(*mesh.names)):
            outcome.combinations += 1
            specs = tuple(
                batch if _has_batch(role, tensor) else P() for role, tensor in zip(trial.roles, tensors, strict=True)
            )
            _sweep_call(trial, tensors, specs, mesh, expected, f"{label}, inputs {batch}", outcome)


def _sweep_call(
    trial: Trial,
    tensors: Sequence[torch.Tensor],
    specs: tuple[P, ...],
    mesh: Mesh,
    expected: Sequence[torch.Tensor],
    label: str,
    outcome: Outcome,
) -> None:
    try:
        results = _run(jit(trial.case.function, specs, P(), mesh=mesh), tensors)
        reason = next(_differences([result.full_tensor() for result in results], expected), None)
    except TraceError as error:
        outcome.refused += 1
        outcome.note(Status.REFUSED, f"{label}: {error}")
    except Exception as error:  # whatever it is, the sweep counts it and goes on
        outcome.errors += 1
        outcome.note(Status.ERROR, f"{label}: {type(error).__name__}: {error}")
    else:
        outcome.wrong += reason is not None
        outcome.passed += reason is None
        outcome.note(Status.PASS if reason is None else Status.WRONG, f"{label}: {reason}" if reason else "")


def _has_batch(role: Role, tensor: torch.Tensor) -> bool:
    return role in (Role.INPUT, Role.COTANGENT) and tensor.ndim > 0


def _otherwise(trial: Trial) -> Iterator[tuple[str, list[torch.Tensor]]]:
    for name, change in MEMORY.items():
        changed = [Role.INPUT, Role.COTANGENT, *([Role.PARAMETER] if name == "channels last" else [])]
        tensors = [
            change(tensor) if role in changed and tensor.ndim else tensor
            for tensor, role in zip(trial.case.tensors, trial.roles, strict=True)
        ]
        if any(not tensor.is_contiguous() for tensor in tensors):
            yield name, tensors


def _run(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    torch.default_generator.manual_seed(SEED)
    return function(*tensors)


def _differences(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Iterator[str]:
    for index, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        reason = apart(found, wanted)
        if reason is not None:
            yield f"result {index}: {reason}"
