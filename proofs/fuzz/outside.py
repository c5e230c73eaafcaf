"""Runs one program outside of jit: a transform acts on the jitted function and on DTensors.

Without a transform, every operator of the program runs on DTensors, with no jit at all.
"""

from __future__ import annotations

import attrs

from proofs.fuzz.check import described, difference, failed, given_arguments
from proofs.fuzz.environment import seeded
from proofs.fuzz.one_device import OneDevice
from proofs.fuzz.outcome import Outcome, Status
from proofs.fuzz.program import Program, mesh_of
from proofs.fuzz.tensors import in_order
from spmd.api.eager.dispatch import implicit_replication
from spmd.api.jit import jit
from spmd.api.values.distribute import distribute
from spmd.api.values.dtensor import DTensor
from spmd.core.spec import P


def check_outside(program: Program) -> Outcome:
    """Check a program; the default dtype must be float64.

    Where the transform maps over a dim of the arguments, these and those of the function are replicated.
    """
    space, mesh = program.compiled(), mesh_of(program.mesh)
    values = [space[argument.name] for argument in program.arguments]
    with OneDevice():
        expected = list(seeded(space["reference"], *map(in_order, values)))
    specs = [P() if program.transform.maps else argument.spec for argument in program.arguments]
    given = values if program.transform.maps else given_arguments(program, space)
    placed = [
        value if isinstance(value, DTensor) else distribute(value, spec, mesh)
        for value, spec in zip(given, specs, strict=True)
    ]
    outcome = described(program, values, mesh)
    space["f"] = jit(space["f"], tuple(specs), mesh=mesh)
    try:
        with implicit_replication():  # for the tensors that the function closes over
            results = list(seeded(space["program"], *placed))
            placed = [result if isinstance(result, DTensor) else distribute(result, P(), mesh) for result in results]
            for result in placed:
                result.shards  # noqa: B018  # a view from before a write is refused
    except Exception as error:
        return failed(outcome, error)
    for index, (result, truth) in enumerate(zip(placed, expected, strict=True)):
        reason = difference(result, truth)
        if reason:
            return attrs.evolve(outcome, status=Status.WRONG, kind=reason[:60], message=f"result {index}: {reason}")
    return outcome
