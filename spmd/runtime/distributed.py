"""The distributed runtime: one rank of a mesh in this process, on torch.distributed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.autograd import profiler

from spmd.collectives.distributed.history import history
from spmd.job import calling_thread
from spmd.lowering.program import LocalProgram
from spmd.runtime.agreement import check_same_program
from spmd.runtime.codegen import RankProgram, generate, name_origin
from spmd.runtime.communication import communicating
from spmd.runtime.torch_settings import run_isolated


class DistributedProgram:
    """A local program, compiled for this process's rank.

    Construction is a collective call: ranks check that their programs are identical, and create process groups for the
    mesh axes along which they communicate. Random numbers come from this process's default generator, which must be in
    the same state on all ranks. A value is freed after its last use.

    Raises:
        DivergenceError: on every rank, if their programs differ.
        SpmdError: a rank failed to build its program, or did not make the call. Calling the program raises it too, if a
            collective fails, or if another thread is in a collective call.
    """

    __slots__ = ("_function", "_graph", "_history", "_name", "_number", "_profiled", "source")

    def __init__(self, program: LocalProgram) -> None:
        self._name = program.name
        self._number, self._history = check_same_program(program), history(program.mesh.ranks)
        (coordinate,) = program.mesh.held_coordinates
        self._graph = communicating(program.graph(coordinate), program.mesh, coordinate, program.schedule)
        generated = generate(self._graph)
        self._function, self.source = generated.function, generated.source
        self._profiled: RankProgram | None = None

    @property
    def functions(self) -> Sequence[RankProgram]:
        """The program of this process's rank as a function of its local inputs."""
        return (self._function,)

    def __call__(
        self, inputs: list[tuple[torch.Tensor, ...]], numbers: Sequence[float] = ()
    ) -> list[tuple[torch.Tensor, ...]]:
        """Run the program once on this rank.

        Args:
            inputs: for each input this rank's shard, alone in a tuple. The list is emptied, so that shards without
                other references are freed after their last use.
            numbers: the dynamic numbers of the call.

        Returns:
            For each output this rank's shard, alone in a tuple.
        """
        if self._number is None:
            return self._run(inputs, numbers)
        calling_thread.enter(self._name)
        try:
            self._history.add(self._number)
            return self._run(inputs, numbers)
        finally:
            calling_thread.leave()

    def _run(self, inputs: list[tuple[torch.Tensor, ...]], numbers: Sequence[float]) -> list[tuple[torch.Tensor, ...]]:
        function = self._function
        if profiler._is_profiler_enabled:
            function = self._profiled = self._profiled or generate(self._graph, ranged=True).function
        shards = list(itertools.chain.from_iterable(inputs))
        inputs.clear()
        try:
            results: tuple[torch.Tensor, ...] = run_isolated(function, shards, numbers)
        except Exception as error:
            name_origin(error)
            raise
        return list(zip(results, strict=True))
