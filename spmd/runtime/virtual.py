"""All ranks of a mesh in this process, in lock step: no threads, deterministic, debuggable."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmd.collectives import virtual
from spmd.lower.program import LocalProgram
from spmd.runtime.codegen import generate


class VirtualProgram:
    """A local program, compiled for every rank of a virtual mesh.

    Ranks run one after the other up to a collective, which is a function over what all of them hold there. A value is
    freed at its last use on its rank.
    """

    __slots__ = ("_functions", "_mesh", "_primitives")

    def __init__(self, program: LocalProgram) -> None:
        generated = {}
        for coordinate in program.mesh.coordinates():
            module = program.graph_module(coordinate)
            if module not in generated:
                generated[module] = generate(module)
        self._mesh = program.mesh
        ranks = [generated[program.graph_module(coordinate)] for coordinate in program.mesh.coordinates()]
        self._functions = [rank.function for rank in ranks]
        self._primitives = ranks[0].primitives

    def __call__(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
        """Run a step.

        Args:
            inputs: for each input the shards of all ranks, in rank order.

        Returns:
            For each output the shards of all ranks, in rank order.
        """
        mesh = self._mesh
        with torch.no_grad():
            locals_of_ranks = zip(*inputs, strict=True) if inputs else ((),) * mesh.size
            ranks = [function(*shards) for function, shards in zip(self._functions, locals_of_ranks, strict=True)]
            calls = [(next(rank), _NO_KWARGS) for rank in ranks]
            for primitive in self._primitives:
                results = virtual.run(primitive, mesh, calls)
                del calls  # frees what a collective has consumed before the ranks go on
                results.reverse()
                calls = [(rank.send(results), _NO_KWARGS) for rank in ranks]
            return list(zip(*(outputs for outputs, _ in calls), strict=True))


_NO_KWARGS: dict[str, object] = {}
