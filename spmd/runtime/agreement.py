"""The check before a program's first run that all processes are about to run the same program."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from spmd.collectives.distributed.agreement import check_agreement, describe
from spmd.core.mesh import Mesh
from spmd.lowering.program import LocalProgram
from spmd.runtime.torch_settings import generator_state


def first_run(mesh: Mesh) -> str:
    """The name, in messages, of the call in which all ranks compare their programs."""
    return f"the first run of a jitted function on {mesh}"


def check_same_program(program: LocalProgram) -> None:
    """Compare the program across ranks and, if it has random operators, the state of their default generators.

    All ranks must make this call.

    Raises:
        DivergenceError: on every rank, if they differ; it shows the first argument, result or line that differs.
        SpmdError: a rank failed to build its program, or did not make the call.
    """
    call = first_run(program.mesh)
    check_agreement(
        call,
        dict(_claims(program)),
        "All ranks must call the same function with arguments of the same shapes, dtypes and specs, in the same order.",
    )
    if any(operation.is_random for operation in program.graph().operations):
        state = generator_state(program.mesh.device)
        check_agreement(
            call,
            {f"The random generator before {program.name}": hashlib.sha256(bytes(state.tolist())).hexdigest()[:8]},
            "Every rank draws the whole tensor, so that numbers do not depend on the mesh: call torch.manual_seed with "
            "one seed on all ranks, and draw alike before the call.",
        )


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
    yield f"The program of {program.name}", program.as_text()
    for value, tensor in graph.constants:
        yield f"Constant {value.name} of {program.name}", describe(tensor)
