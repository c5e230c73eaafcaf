"""The virtual runtime: all ranks of a mesh in one process, in lockstep and without threads, so deterministic."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from spmd.collectives import virtual
from spmd.lowering.program import LocalProgram
from spmd.runtime.codegen import SuspensionPoint, generate, name_origin
from spmd.runtime.torch_settings import run_isolated


class VirtualProgram:
    """A local program, compiled for every rank of a virtual mesh.

    Ranks run one after the other up to a primitive, which is then computed by one function over the operands of all
    ranks. Random numbers are drawn once and shared by all ranks. A value is freed after its last use on its rank.
    """

    __slots__ = ("_functions", "_mesh", "_stops")

    def __init__(self, program: LocalProgram) -> None:
        generated = {}
        for coordinate in program.mesh.coordinates():
            module = program.graph_module(coordinate)
            if module not in generated:
                generated[module] = generate(module)
        self._mesh = program.mesh
        ranks = [generated[program.graph_module(coordinate)] for coordinate in program.mesh.coordinates()]
        self._functions = [rank.function for rank in ranks]
        self._stops = ranks[0].stops

    def __call__(self, inputs: list[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
        """Run the program once on all ranks.

        Args:
            inputs: for each input the shards of all ranks, in rank order. The list is emptied, so that shards without
                other references are freed after their last use.

        Returns:
            For each output the shards of all ranks, in rank order.
        """
        try:
            return run_isolated(self._run, inputs)
        except Exception as error:
            name_origin(error)
            raise

    def _run(self, inputs: list[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
        mesh = self._mesh
        ranks = self._start(inputs)
        calls = [(next(rank), _NO_KWARGS) for rank in ranks]
        for stop in self._stops:
            results = virtual.run(stop.op, mesh, calls) if stop.op in virtual.KERNELS else _draw(stop, calls)
            del calls  # frees the operands of a collective before the ranks go on
            results.reverse()
            calls = [(rank.send(results), _NO_KWARGS) for rank in ranks]
        return list(zip(*(outputs for outputs, _ in calls), strict=True))

    def _start(self, inputs: list[tuple[torch.Tensor, ...]]) -> list[Generator[tuple[Any, ...], Any, None]]:
        """Start the programs of all ranks, which then hold the runtime's only references to the inputs."""
        locals_of_ranks = zip(*inputs, strict=True) if inputs else ((),) * self._mesh.size
        ranks = [function(list(shards)) for function, shards in zip(self._functions, locals_of_ranks, strict=True)]
        inputs.clear()
        return ranks


def _draw(stop: SuspensionPoint, calls: Sequence[tuple[tuple[Any, ...], Mapping[str, object]]]) -> list[Any]:
    """Call a random operator once for all ranks: it draws the global tensor, so all ranks have the same arguments."""
    arguments = calls[0][0]
    count = len(arguments) - len(stop.keywords)
    return [stop.op(*arguments[:count], **dict(zip(stop.keywords, arguments[count:], strict=True)))] * len(calls)


_NO_KWARGS: dict[str, object] = {}
