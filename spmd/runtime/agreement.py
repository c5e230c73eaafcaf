"""Before a program's first run: that all processes are about to run the same one."""

from __future__ import annotations

import hashlib

import torch

from spmd.collectives.agreement import check_agreement
from spmd.lower.program import LocalProgram
from spmd.mesh import Mesh
from spmd.optimize.clean import is_draw


def check_same_program(program: LocalProgram) -> None:
    """Compare the program across ranks and, if it draws random numbers, the state of their generators.

    Raises:
        DivergenceError: on every rank, if they differ.
    """
    check_agreement(
        {f"The program {program.name}": _digest(program.as_text().encode())},
        "All ranks must call the same function with arguments of the same shapes, dtypes and specs, in the same order.",
    )
    if any(is_draw(node) for node in program.graph_module().graph.nodes):
        state = _generator_state(program.mesh)
        check_agreement(
            {f"The random generator before {program.name}": _digest(bytes(state.tolist()))},
            "Every rank draws the whole tensor, so that numbers do not depend on the mesh: call torch.manual_seed with "
            "one seed on all ranks, and draw alike before the call.",
        )


def _generator_state(mesh: Mesh) -> torch.Tensor:
    return torch.cuda.get_rng_state() if mesh.device.type == "cuda" else torch.get_rng_state()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
