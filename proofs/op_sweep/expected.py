"""What plain torch gives for a call: what all runs are compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from proofs.op_sweep.cases import Case
from proofs.op_sweep.outcome import Outcome, Status, said_by


def seed() -> None:
    """Seed a run, so that random operators draw the same numbers in all runs of a call."""
    for generator in (torch.default_generator, *torch.cuda.default_generators):
        generator.manual_seed(42)


def expected_of(case: Case, run: Callable[[], list[torch.Tensor]], outcome: Outcome) -> list[torch.Tensor] | None:
    """The results of plain torch; None if it fails or gives no dense tensors, so that there is nothing to compare with.

    Args:
        case: the call.
        run: runs it with plain tensors.
        outcome: counts the call, or notes why it is skipped.
    """
    seed()
    try:
        expected = run()
    except Exception as error:
        outcome.note(Status.SKIPPED, f"{case.label}: {said_by(error)}")
        return None
    if not expected or any(tensor.layout is not torch.strided for tensor in expected):
        outcome.note(Status.SKIPPED, f"{case.label}: no dense tensor in the result")
        return None
    outcome.calls += 1
    return expected
