"""One rank of a mesh in this process, on torch.distributed."""

from __future__ import annotations

import torch

from spmd.lowering.program import LocalProgram
from spmd.runtime.agreement import check_same_program
from spmd.runtime.codegen import generate, name_origin
from spmd.runtime.overlap import overlap
from spmd.runtime.torch_settings import run_isolated


class DistributedProgram:
    """A local program, compiled for this process's rank.

    Making one is a collective call: ranks compare what they are about to run, and make process groups for the axes
    along which it communicates. Random numbers come from this process's own default generator, which ranks seed alike.
    A value is freed at its last use.

    Raises:
        DivergenceError: on every rank, if their programs differ.
        SpmdError: a rank fails to make its program, or does not come. A step raises it too.
    """

    __slots__ = ("_function", "source")

    def __init__(self, program: LocalProgram) -> None:
        check_same_program(program)
        (coordinate,) = program.mesh.held_coordinates
        generated = generate(overlap(program.graph_module(coordinate), program.mesh, coordinate), lockstep=False)
        self._function, self.source = generated.function, generated.source

    def __call__(self, inputs: list[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
        """Run a step.

        Args:
            inputs: for each input this rank's shard, alone in a tuple. The list is emptied, so that shards which
                nobody else holds are freed at their last use.

        Returns:
            For each output this rank's shard, alone in a tuple.
        """
        shards = [shard for (shard,) in inputs]
        inputs.clear()
        try:
            results: tuple[torch.Tensor, ...] = run_isolated(self._function, shards)
        except Exception as error:
            name_origin(error)
            raise
        return [(shard,) for shard in results]
