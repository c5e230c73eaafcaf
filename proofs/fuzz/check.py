"""Runs one program on virtual ranks and on one device, and compares the results."""

from __future__ import annotations

import functools
import re
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from proofs.fuzz.environment import seeded
from proofs.fuzz.generate import generate
from proofs.fuzz.one_device import OneDevice
from proofs.fuzz.outcome import Outcome, Status
from proofs.fuzz.program import Program, default_dtype, mesh_of
from proofs.fuzz.tensors import agrees, in_order
from spmd import Machine
from spmd.api.jit import jit
from spmd.api.values.dtensor import DTensor
from spmd.collectives.traffic import record_traffic
from spmd.core.mesh import Mesh
from spmd.core.shards import reduced, split
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.errors import SpmdError
from spmd.testing.traffic import comms_differences

_TOLERANCE = 1e-8  # relative to the largest number of a result
_MACHINES = (Machine(), Machine(flops=1e9, memory_bandwidth=1e8, latency=0.0))


def check_seed(
    seed: int,
    generated: Callable[[], None] = lambda: None,
    avoid: frozenset[str] = frozenset(),
    program: Program | None = None,
    run: Callable[[Program], Outcome] | None = None,
) -> Outcome:
    """Generate the program of a seed and check it.

    Args:
        seed: the seed of the program.
        generated: called when the program is generated and before it is checked.
        avoid: operators of the pool and transforms; programs with one of them are not run.
        program: the program of the seed, if it is already generated.
        run: runs it; by default `check`.
    """
    start = time.process_time()
    with default_dtype(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = program or generate(seed)
        made = time.process_time()
        generated()
        found = avoid & {program.transform.kind.value, *(line.operator for line in program.lines)}
        outcome = Outcome(seed, Status.SKIPPED, f"with {min(found)}") if found else (run or check)(program)
    return attrs.evolve(outcome, seconds=time.process_time() - start, generating=made - start)


@functools.cache
def known_program(seed: int) -> Program:
    """The program of a seed, cached for programs that are checked many times."""
    with default_dtype(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return generate(seed)


def check(program: Program) -> Outcome:
    """Check a program; the default dtype must be float64."""
    space = program.compiled()
    values = [space[argument.name] for argument in program.arguments]
    with OneDevice():
        expected = list(seeded(space["reference"], *map(in_order, values)))
    mesh = mesh_of(program.mesh)
    given = given_arguments(program, space)
    outcome = described(program, values, mesh)
    out_specs = [*program.out_specs, *[P()] * len(expected)][: len(expected)]
    jitted = jit(
        space["program"],
        tuple(argument.spec for argument in program.arguments),
        out_specs,
        mesh=mesh,
        machine=_MACHINES[program.machine],
    )
    try:
        with record_traffic() as traffic:
            results = list(seeded(jitted, *given))
        plan = jitted.plan(*given)
    except Exception as error:
        return failed(outcome, error)
    planned = {str(operation.op) for operation in plan.graph.operations} | {comm.kind for comm in plan.comms}
    outcome = attrs.evolve(outcome, collectives=len(traffic.transfers), planned=tuple(sorted(planned)))
    if len(results) != len(expected):
        return attrs.evolve(outcome, status=Status.WRONG, kind="number of results", message=f"{len(results)}")
    for index, (result, truth) in enumerate(zip(results, expected, strict=True)):
        reason = difference(result, truth, out_specs[index])
        if reason:
            message = f"result {index}, {out_specs[index]!r}: {reason}"
            return attrs.evolve(outcome, status=Status.WRONG, kind=_skeleton(reason), message=message)
    differences = comms_differences(plan, traffic)
    if differences:
        return attrs.evolve(
            outcome, status=Status.COMMS, kind=_skeleton(differences[0]), message="; ".join(differences)
        )
    return outcome


def given_arguments(program: Program, space: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that a jitted function gets: plain tensors, but DTensors for those that are partial."""
    mesh, given = mesh_of(program.mesh), []
    for argument in program.arguments:
        spec = DTensorSpec.make(mesh, argument.spec, TensorMeta.of(space[argument.name]))
        given.append(_spread(space[f"{argument.name}_parts"], spec) if spec.partial else space[argument.name])
    return given


def failed(outcome: Outcome, error: Exception) -> Outcome:
    """The outcome of a program that raised an error: refused, if it is one of this package's own, or torch's in a body.

    A trace runs bodies that one device does not: of loops without a trip, and the other sides of branches.
    """
    refused = isinstance(error, SpmdError) or any(text in str(error) for text in _REFUSED_IN_BODIES)
    status = Status.REFUSED if refused else Status.CRASH
    return attrs.evolve(outcome, status=status, kind=_kind(error), message=_text(error))


_REFUSED_IN_BODIES = ("randomness error mode", "out=... arguments don't support automatic differentiation")
"""Of errors of torch's for what a transform does not take."""


def _spread(parts: Sequence[torch.Tensor], spec: DTensorSpec) -> DTensor:
    """A DTensor with a partial axis, from its parts: ranks that differ on that axis hold shards of different parts."""
    return DTensor.from_local(split(parts, spec), spec.mesh, spec.pspec, shape=parts[0].shape)


def described(program: Program, values: Sequence[torch.Tensor], mesh: Mesh) -> Outcome:
    """What a program is made of, as an outcome that is right."""
    specs = [DTensorSpec.make(mesh, a.spec, TensorMeta.of(v)) for a, v in zip(program.arguments, values, strict=True)]
    last = tuple(size - 1 for size in mesh.sizes)
    return Outcome(
        program.seed,
        Status.RIGHT,
        transform=program.transform.kind.value,
        operators=tuple(sorted({line.operator for line in program.lines} - {"adapt"})),
        values=program.values,
        strided=program.strided,
        uneven=any(not spec.is_even for spec in specs),
        empty=any(
            axes and not size for spec in specs for axes, size in zip(spec.dims, spec.local_shape(last), strict=True)
        ),
        partial=any(spec.partial for spec in specs) or any(spec.partial for spec in program.out_specs),
        ranks=mesh.size,
    )


def difference(result: Any, expected: torch.Tensor, spec: P | None = None, tolerance: float = _TOLERANCE) -> str:
    """Why a result is not as expected on every rank, with a spec if one is given; empty if it is."""
    if not isinstance(result, DTensor):
        return f"a {type(result).__name__}"
    if (tuple(result.shape), result.dtype) != (tuple(expected.shape), expected.dtype):
        return f"is {TensorMeta.of(result)}, expected {TensorMeta.of(expected)}"
    if spec is not None and result.spec.pspec != spec:
        return f"has {result.spec.pspec!r}"
    for rank, slices, whole in reduced(result.shards, result.spec):
        wanted = expected[slices]
        if whole.shape != wanted.shape or whole.dtype != wanted.dtype:
            return f"rank {rank} holds {TensorMeta.of(whole)}, expected {TensorMeta.of(wanted)}"
        if not agrees(whole, wanted, tolerance):
            return f"values differ on rank {rank}: got {_numbers(whole)}, expected {_numbers(wanted)}"
    return ""


def _numbers(tensor: torch.Tensor) -> str:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return str([round(x, 6) if isinstance(x, float) else x for x in tensor.flatten().tolist()[:8]])


def _text(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{where.filename.rsplit('/', 2)[-1]}:{where.lineno}"
    return f"{type(error).__name__}: {error} [{place}]"[:1500]


def _kind(error: BaseException) -> str:
    return f"{type(error).__name__}: {_skeleton(str(error))}"


def _skeleton(text: str) -> str:
    """A message without numbers and names, which differ between programs."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    first = re.sub(r" at \S+\.py:\d+( \(`.*`\))?", "", first)
    first = re.sub(r"\[[^\]]*\]|\([^)]*\)", "[]", first)
    return re.sub(r"\b[xcv]?\d+(\.\d+)?(e[+-]?\d+)?\b", "N", first)[:160]
