"""One module or function: its calls, each with the usual placements of its tensors, against plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import torch

from proofs.nn_sweep.call import Trial, trial
from proofs.nn_sweep.memory import sweep_memory
from proofs.nn_sweep.placements import layouts
from proofs.nn_sweep.setups import Setup
from proofs.nn_sweep.subjects import Subject
from proofs.op_sweep.outcome import Outcome, Status, said_by
from proofs.op_sweep.placements import Combination
from proofs.op_sweep.sweep import sweep_case
from spmd.core.mesh import Mesh
from spmd.ir.graph import Graph


def sweep_subject(subject: Subject, setup: Setup) -> Outcome:
    """Run one module or function."""
    outcome = Outcome(subject.name)
    mesh = Mesh(tuple(setup.mesh), tuple(setup.mesh.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in _trials(subject, setup, outcome):
            if setup.memory:
                sweep_memory(found, mesh, outcome)
            else:
                choose = partial(_layouts, found, mesh, setup.placements, outcome.calls)
                sweep_case(found.case, mesh, choose, outcome)
    return outcome


def _layouts(found: Trial, mesh: Mesh, most: int, turn: int, graph: Graph) -> list[Combination]:
    return layouts(found, mesh, most, len(graph.operations), turn)


def _trials(subject: Subject, setup: Setup, outcome: Outcome) -> Iterator[Trial]:
    count = 0
    for label, call in subject.calls(setup.training, setup.calls):
        count += 1
        try:
            found = trial(
                call, label, training=setup.training, backward=setup.backward, dtype=getattr(torch, setup.dtype)
            )
        except Exception as error:  # plain torch fails: there is nothing to compare with
            outcome.note(Status.SKIPPED, f"{label}: {said_by(error)}")
            continue
        if found is None:
            outcome.note(Status.SKIPPED, f"{label}: no gradient")
        else:
            yield found
    if not count:
        outcome.note(Status.ERROR, "the sweep has no call of it")
