"""Measures the bytes that a rank's program holds, to check the predicted memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.ir.graph import Operation, iterate_leaves
from spmd.lowering.program import LocalProgram
from spmd.runtime.lockstep import generate_lockstep


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are alive after every operator; `peak` is the most.

    Args:
        tensors: what is alive at the start.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.largest = 0
        self.see(tensors)

    def see(self, made: Any) -> None:
        """Count the storages of new tensors."""
        for leaf in iterate_leaves(made):
            if isinstance(leaf, torch.Tensor) and not (leaf.is_meta or hasattr(leaf, "shards")):  # it has memory
                storage = leaf.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.alive = {key: item for key, item in self.alive.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.see(made)
        return made


def peak_bytes(program: LocalProgram, donated: frozenset[int] = frozenset()) -> int:
    """The most bytes that the program of the rank at coordinate zero holds at once, measured by running it alone.

    Arguments are tensors of ones. Collectives do not run: each result is a new tensor of zeros. Buffers inside kernels
    are not counted.

    Args:
        program: a program with even shards, or one whose largest shards are those of coordinate zero.
        donated: positions of the arguments that the caller does not hold.
    """
    graph = program.graph()
    inputs = [torch.ones(value.meta.shape, dtype=value.meta.dtype) for value in graph.inputs]
    held = [tensor for position, tensor in enumerate(inputs) if position not in donated]
    stops = iter([operation for operation in graph.operations if operation.effect is not None])
    with torch.no_grad(), LiveBytes([*inputs, *(tensor for _, tensor in graph.constants)]) as counter:
        rank = generate_lockstep(graph, program.mesh, [0]).start([[tensor] for tensor in inputs])
        inputs.clear()
        waiting = [next(rank)]
        while waiting[0][0] is not None:
            ((args, kwargs),) = waiting.pop()[1]
            result = [_made_up(next(stops), args, kwargs)]
            del args, kwargs
            waiting.append(rank.send(result))
    del held
    return counter.peak


def largest_bytes(call: Callable[[], Any]) -> int:
    """The size of the largest storage that operators make in a call; buffers inside kernels are not counted."""
    with LiveBytes([]) as counter:
        call()
    return counter.largest


def peak_beside(call: Callable[[], Any], tensors: Callable[[], Sequence[torch.Tensor]]) -> int:
    """The most bytes that are alive after an operator of a call, beside those of the given tensors before it."""
    with LiveBytes(tensors()) as counter:
        before = counter.peak
        call()
    return counter.peak - before


def _made_up(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if operation.is_random:
        return operation.op(*args, **kwargs)
    (result,) = operation.tensors
    return torch.zeros(result.meta.shape, dtype=result.meta.dtype)
