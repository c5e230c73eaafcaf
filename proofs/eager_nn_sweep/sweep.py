"""One module or function: its calls on DTensors under the usual placements, against plain torch."""

from __future__ import annotations

import warnings

import torch

from proofs.eager_nn_sweep.setups import Setup
from proofs.eager_nn_sweep.step import Step
from proofs.eager_nn_sweep.subjects import Calls
from proofs.nn_sweep.call import trial
from proofs.nn_sweep.placements import layouts
from proofs.op_sweep.eager import compare
from proofs.op_sweep.outcome import Outcome, Status, said_by
from proofs.op_sweep.placements import Combination, combination_text, spread
from spmd.api.values.dtensor import wrap
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import SpmdError


def sweep_calls(subject: Calls, setup: Setup) -> Outcome:
    """Run one module or function."""
    outcome = Outcome(subject.name)
    mesh = Mesh(tuple(setup.mesh), tuple(setup.mesh.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for label, call in subject.calls(setup.training, setup.calls):
            try:
                flat = trial(call, label, training=setup.training, backward=False, dtype=getattr(torch, setup.dtype))
                assert flat is not None
                step = Step.of(call, flat)
                expected = step.run(lambda _, tensor: tensor.clone())
            except Exception as error:  # plain torch fails: there is nothing to compare with
                outcome.note(Status.SKIPPED, f"{label}: {said_by(error)}")
                continue
            outcome.calls += 1
            combinations = layouts(flat, mesh, setup.placements, 1, outcome.calls)
            refused = [_sweep(step, label, mesh, combination, expected, outcome) for combination in combinations]
            outcome.refused += any(refused)
    return outcome


def _sweep(
    step: Step, label: str, mesh: Mesh, combination: Combination, expected: list[torch.Tensor], outcome: Outcome
) -> bool:
    """Run one call with one placement of its tensors; whether it is refused."""

    def place(number: int, tensor: torch.Tensor) -> torch.Tensor:
        spec = DTensorSpec.make(mesh, combination[number], TensorMeta.of(tensor))
        return wrap(spec, spread(tensor, spec))

    outcome.combinations += 1
    label = f"{label}: {combination_text(combination)}"
    try:
        reason = compare(step.run(place), expected, step.trial.case.values)
    except Exception as error:
        is_refusal = isinstance(error, SpmdError) or "of a DTensor cannot be set" in str(error)
        outcome.errors += not is_refusal
        outcome.note(Status.REFUSED if is_refusal else Status.ERROR, f"{label}: {said_by(error)}")
        return is_refusal
    outcome.passed += reason is None
    outcome.wrong += reason is not None
    outcome.note(Status.PASS if reason is None else Status.WRONG, "" if reason is None else f"{label}: {reason}")
    return False
