"""The virtual runtime: all ranks of a mesh in one process, in lockstep and without threads, so deterministic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.autograd import profiler

from spmd.collectives import virtual
from spmd.collectives.host import HOST_PRINT, print_lines, text_of
from spmd.collectives.local import LOCALS
from spmd.collectives.primitives import COLLECTIVES
from spmd.core.mesh import Mesh
from spmd.errors import DivergenceError
from spmd.ir.effects import Effect, effect_of
from spmd.ir.graph import Graph, Operation, iterate_leaves
from spmd.ir.random_operators import TEMPLATED
from spmd.lowering.program import LocalProgram
from spmd.runtime.codegen import RankProgram, generate, name_origin
from spmd.runtime.lockstep import LockstepProgram, Running, generate_lockstep
from spmd.runtime.ranges import InRanges
from spmd.runtime.torch_settings import drawing_from, generator_state, run_isolated
from spmd.runtime.varying import varying_axes


class VirtualProgram:
    """A local program, compiled for all ranks of a virtual mesh.

    Ranks run one after the other up to an operation with an effect. A collective is then computed by one function over
    the operands of all ranks. Random numbers are drawn once and shared by all ranks. What ranks with one program
    compute from equal tensors is computed once for all of them (`spmd.runtime.varying`), so replicas of an argument
    must be equal. A value is freed after its last use.
    """

    def __init__(self, program: LocalProgram) -> None:
        self._mesh = program.mesh
        self._graphs = [program.graph(coordinate) for coordinate in program.mesh.coordinates()]
        ranks: dict[Graph, list[int]] = {}
        for rank, graph in enumerate(self._graphs):
            ranks.setdefault(graph, []).append(rank)
        self._ranks = ranks
        self._varying = varying_axes(list(ranks), program.mesh, program.input_specs)
        self._programs = self._generated(ranged=False)

    def _generated(self, ranged: bool) -> list[LockstepProgram]:
        return [
            generate_lockstep(graph, self._mesh, held, self._varying, ranged=ranged, takes_turns=len(self._ranks) > 1)
            for graph, held in self._ranks.items()
        ]

    @cached_property
    def _profiled(self) -> list[LockstepProgram]:
        return self._generated(ranged=True)

    @cached_property
    def functions(self) -> Sequence[RankProgram]:
        """The programs of all ranks as functions of their local inputs; empty if they need other ranks or their own."""
        distinct = dict.fromkeys(self._graphs)
        if any(_needs_runtime(operation) for graph in distinct for operation in graph.operations):
            return ()
        generated = {graph: generate(graph).function for graph in distinct}
        return [generated[graph] for graph in self._graphs]

    def __call__(
        self, inputs: list[tuple[torch.Tensor, ...]], numbers: Sequence[float] = ()
    ) -> list[tuple[torch.Tensor, ...]]:
        """Run the program once on all ranks.

        Args:
            inputs: for each input the shards of all ranks, in rank order. The list is emptied, so that shards without
                other references are freed after their last use.
            numbers: the dynamic numbers of the call.

        Returns:
            For each output the shards of all ranks, in rank order; ranks may share a tensor.
        """
        try:
            return run_isolated(self._run, inputs, numbers)
        except Exception as error:
            name_origin(error)
            raise

    def _run(self, inputs: list[tuple[torch.Tensor, ...]], numbers: Sequence[float]) -> list[tuple[torch.Tensor, ...]]:
        own = self._profiled if profiler._is_profiler_enabled else self._programs
        programs = [program.start(inputs, numbers) for program in own]
        inputs.clear()  # from here on, only the programs refer to the inputs
        return run_in_lockstep(self._mesh, programs)


def _needs_runtime(operation: Operation) -> bool:
    """Whether an operation needs what the runtime knows: other ranks, or the number of its own."""
    return operation.effect not in (None, Effect.REGION) or operation.op in LOCALS


def run_in_lockstep(mesh: Mesh, programs: Sequence[Running]) -> list[tuple[torch.Tensor, ...]]:
    """Run the programs of all ranks to their ends.

    Args:
        mesh: the mesh.
        programs: the programs, started; each rank runs one of them.

    Returns:
        For each output the shards of all ranks, in rank order.

    Raises:
        DivergenceError: ranks call different operators with effects, or different numbers of them.
    """
    op, yielded = _step([next(program) for program in programs])
    while op is not None:
        calls = _by_rank(mesh, yielded)
        try:
            results = _run(op, mesh, calls)
        except Exception as error:
            programs[0].throw(error)  # through its program, whose line then tells the operation and the user's line
            raise
        del calls, yielded  # frees the operands of a collective before the ranks go on
        copies = [results, *(list(results) for _ in programs[1:])]
        del results  # so that only the programs refer to the results
        op, yielded = _step([program.send(copies.pop()) for program in programs])
    outputs = [zip(instances, positions, strict=True) for instances, positions in yielded]
    return [tuple(_by_rank(mesh, parts)) for parts in zip(*outputs, strict=True)]


def _by_rank(mesh: Mesh, yielded: Sequence[tuple[Sequence[Any], Mapping[int, int]]]) -> Sequence[Any]:
    """For each rank what its instance has; `yielded` has the instances and their positions for each program."""
    if len(yielded) == 1:
        ((instances, positions),) = yielded
        return instances if len(instances) == mesh.size else [instances[number] for number in positions.values()]
    found: list[Any] = [None] * mesh.size
    for instances, positions in yielded:
        for rank, position in positions.items():
            found[rank] = instances[position]
    return found


def _step(yielded: Sequence[tuple[Any, Any, Any]]) -> tuple[Any, list[tuple[Any, Any]]]:
    """The operator that all programs call next, None at their ends, and the rest of what each yields."""
    ops = [op for op, _, _ in yielded]
    if ops.count(ops[0]) != len(ops):
        one, other = list(dict.fromkeys(ops))[:2]
        raise DivergenceError(
            f"Ranks run different programs: one calls {one or 'nothing more'} where another calls "
            f"{other or 'nothing more'}. Collectives and random operators must be the same on all ranks."
        )
    return ops[0], [(instances, positions) for _, instances, positions in yielded]


def _run(op: Any, mesh: Mesh, calls: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The result of an operator with an effect on every rank."""
    if op in COLLECTIVES:
        return virtual.run(op, mesh, calls)
    if isinstance(op, InRanges):
        return op(lambda op: _run(op, mesh, calls))
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
    distinct = list({id(call): call for call in calls}.values())
    first, *others = ([leaf for leaf in iterate_leaves(call) if isinstance(leaf, torch.Tensor)] for call in distinct)
    args, kwargs = calls[0]
    if op in TEMPLATED or all(all(map(torch.equal, first, other)) for other in others):
        return [op(*args, **kwargs)] * len(calls)
    state, results = generator_state(mesh.device), {}
    for call in distinct[1:]:
        with drawing_from(state, mesh.device):
            results[id(call)] = op(*call[0], **call[1])
    results[id(distinct[0])] = op(*args, **kwargs)
    return [results[id(call)] for call in calls]
