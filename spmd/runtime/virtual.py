"""The virtual runtime: all ranks of a mesh in one process, in lockstep and without threads, so deterministic."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import torch

from spmd.collectives import virtual
from spmd.collectives.host import HOST_PRINT, print_lines, text_of
from spmd.collectives.local import LOCALS
from spmd.collectives.primitives import COLLECTIVES
from spmd.core.mesh import Mesh
from spmd.errors import DivergenceError
from spmd.ir.effects import Effect, effect_of
from spmd.ir.graph import Operation, iterate_leaves
from spmd.ir.random_operators import TEMPLATED
from spmd.lowering.program import LocalProgram
from spmd.runtime.codegen import RankProgram, generate, name_origin
from spmd.runtime.torch_settings import drawing_from, generator_state, run_isolated

Rank: TypeAlias = Generator[tuple[Any, Any], Any, None]
"""A rank's program that is running; see `spmd.runtime.codegen.RankProgram`."""


class VirtualProgram:
    """A local program, compiled for every rank of a virtual mesh.

    Ranks run one after the other up to an operation with an effect. A collective is then computed by one function over
    the operands of all ranks. Random numbers are drawn once and shared by all ranks. A value is freed after its last
    use on its rank. If there is no such operation, the programs are plain functions.
    """

    __slots__ = ("_functions", "_is_lockstep", "_mesh")

    def __init__(self, program: LocalProgram) -> None:
        self._mesh = program.mesh
        graphs = [program.graph(coordinate) for coordinate in program.mesh.coordinates()]
        distinct = list(dict.fromkeys(graphs))
        self._is_lockstep = any(_needs_runtime(operation) for graph in distinct for operation in graph.operations)
        lockstep = program.mesh if self._is_lockstep else None
        generated = {graph: generate(graph, lockstep) for graph in distinct}
        self._functions = [generated[graph].function for graph in graphs]

    @property
    def functions(self) -> Sequence[RankProgram]:
        """The programs of all ranks as functions of their local inputs; empty if they run in lockstep."""
        return () if self._is_lockstep else self._functions

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
        shards = [list(held) for held in zip(*inputs, strict=True)] if inputs else [[] for _ in self._functions]
        inputs.clear()  # from here on, only the lists refer to the inputs, which the programs empty
        programs = zip(self._functions, shards, strict=True)
        if not self._is_lockstep:
            return list(zip(*[function(held) for function, held in programs], strict=True))
        ranks = [function(held, rank) for rank, (function, held) in enumerate(programs)]
        return list(zip(*run_in_lockstep(self._mesh, ranks), strict=True))


def _needs_runtime(operation: Operation) -> bool:
    """Whether an operation needs what the runtime knows: other ranks, or the number of its own."""
    return operation.effect is not None or operation.op in LOCALS


def run_in_lockstep(mesh: Mesh, ranks: Sequence[Rank]) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Run the programs of all ranks to their ends.

    Args:
        mesh: the mesh.
        ranks: the programs, started, in rank order.

    Returns:
        The outputs of each rank.

    Raises:
        DivergenceError: ranks call different operators with effects, or different numbers of them.
    """
    op, calls = _step([next(rank) for rank in ranks])
    while op is not None:
        try:
            results = _run(op, mesh, calls)
        except Exception as error:
            ranks[0].throw(error)  # through its program, whose line then tells the operation and the user's line
            raise
        del calls  # frees the operands of a collective before the ranks go on
        results.reverse()
        op, calls = _step([rank.send(results) for rank in ranks])
    return calls


def _step(yielded: Sequence[tuple[Any, Any]]) -> tuple[Any, tuple[Any, ...]]:
    """The operator that all ranks call next and the call of each; None and their outputs if they are at their ends."""
    ops, calls = zip(*yielded, strict=True)
    if ops.count(ops[0]) != len(ops):
        one, other = list(dict.fromkeys(ops))[:2]
        raise DivergenceError(
            f"Ranks run different programs: one calls {one or 'nothing more'} where another calls "
            f"{other or 'nothing more'}. Collectives and random operators must be the same on all ranks."
        )
    return ops[0], calls


def _run(op: Any, mesh: Mesh, calls: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The result of an operator with an effect on every rank."""
    if op in COLLECTIVES:
        return virtual.run(op, mesh, calls)
    args, kwargs = calls[0]
    if op is HOST_PRINT:
        print_lines((rank, text_of(*arguments)) for rank, (arguments, _) in enumerate(calls))
        return [torch.empty(0)] * len(calls)
    if effect_of(op, args, kwargs) is Effect.RANDOM:
        return _draw(op, mesh, calls)
    return [op(*args, **kwargs) for args, kwargs in calls]


def _draw(op: Any, mesh: Mesh, calls: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The results of a random operator: one for all ranks, as they draw the global tensor.

    In a manual region they may have other operands: each draws the same random numbers for its own.
    """
    args, kwargs = calls[0]
    first, *others = ([leaf for leaf in iterate_leaves(call) if isinstance(leaf, torch.Tensor)] for call in calls)
    if op in TEMPLATED or all(all(map(torch.equal, first, other)) for other in others):
        return [op(*args, **kwargs)] * len(calls)
    state, results = generator_state(mesh.device), []
    for args, kwargs in calls[1:]:
        with drawing_from(state, mesh.device):
            results.append(op(*args, **kwargs))
    args, kwargs = calls[0]
    return [op(*args, **kwargs), *results]
