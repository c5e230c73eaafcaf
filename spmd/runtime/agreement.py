"""The check before a program's first run that all processes are about to run the same program."""

from __future__ import annotations

from collections.abc import Iterator

from spmd.collectives.distributed.agreement import check_agreement, describe, digest, spans_processes
from spmd.collectives.distributed.history import history
from spmd.core.mesh import Mesh
from spmd.lowering.program import LocalProgram
from spmd.runtime.torch_settings import generator_state


def first_run(mesh: Mesh) -> str:
    """The name, in messages, of the call in which all ranks compare their programs."""
    return f"the first run of a jitted function on {mesh}"


def check_same_program(program: LocalProgram) -> int | None:
    """Compare the program across ranks and, if it has random operators, the state of their default generators.

    All ranks must make this call.

    Returns:
        The number of the program in the history of the mesh's processes; None if it has no collectives, so that a rank
        may run it alone.

    Raises:
        DivergenceError: on every rank, if they differ; it shows the first argument, result or line that differs.
        SpmdError: a rank failed to build its program, or did not make the call.
    """
    call = first_run(program.mesh)
    check_agreement(
        call,
        dict(_claims(program)),
        "All ranks must call the same function with arguments of the same shapes, dtypes and specs, in the same order.",
        program.mesh.ranks,
    )
    if any(operation.is_random for operation in program.graph().operations):
        check_agreement(
            call,
            {f"The random generator before {program.name}": generator_digest(program.mesh)},
            SAME_GENERATOR,
            program.mesh.ranks,
        )
    sent = program.collectives
    if not sent or not spans_processes(program.mesh):
        return None
    return history(program.mesh.ranks).number(f"{program.name} at {sent[0].source}")


SAME_GENERATOR = (
    "Every rank draws the whole tensor, so that numbers do not depend on the mesh: call torch.manual_seed with one "
    "seed on all ranks, and draw alike before the call."
)
"""What is expected of the generators of ranks, and what to do."""


def generator_digest(mesh: Mesh) -> str:
    """A digest of the state of the default generator of the mesh's device, which is on the host."""
    return digest(generator_state(mesh.device))


def _claims(program: LocalProgram) -> Iterator[tuple[str, str]]:
    """What ranks compare, by name: the function, the specs, the program's text and its constants.

    The text is that of coordinate zero on every rank; where shards are uneven, other coordinates follow from the specs.
    """
    yield "The function", program.name
    graph = program.graph()
    for value, spec in zip(graph.inputs, program.input_specs, strict=True):
        yield f"Argument {value.name} of {program.name}", str(spec)
    for number, spec in enumerate(program.output_specs):
        yield f"Result {number} of {program.name}", str(spec)
    yield f"The program of {program.name}", program.as_text(fold=False)
    for value, tensor in graph.constants:
        yield f"Constant {value.name} of {program.name}", describe(tensor)
