"""Measures the bytes that a rank's program holds, to check the predicted memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.ir.graph import iterate_leaves
from spmd.lowering.passes.clean import is_random_node
from spmd.lowering.program import LocalProgram, is_primitive
from spmd.runtime.codegen import generate


class _Counter(TorchDispatchMode):
    """Counts the bytes of the storages that are alive after every operator."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.see(tensors)

    def see(self, made: Any) -> None:
        for leaf in iterate_leaves(made):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: item for key, item in self.alive.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.see(made)
        return made


def peak_bytes(program: LocalProgram, donated: frozenset[int] = frozenset()) -> int:
    """The most bytes that the program of the rank at coordinate zero holds at once, measured by running it alone.

    Arguments are tensors of ones. Collectives do not run: each result is a new tensor of zeros. `shard` returns a slice
    of its operand, as in a runtime. Buffers inside kernels are not counted.

    Args:
        program: a program with even shards, or one whose largest shards are those of coordinate zero.
        donated: positions of the arguments that the caller does not hold.
    """
    module = program.graph_module()
    generated = generate(module)
    nodes = list(module.graph.nodes)
    inputs = [_ones(node) for node in nodes if node.op == "placeholder"]
    held = [tensor for position, tensor in enumerate(inputs) if position not in donated]
    constants = [getattr(module, node.target) for node in nodes if node.op == "get_attr"]
    stops = [node for node in nodes if is_primitive(node) or is_random_node(node)]
    with torch.no_grad(), _Counter([*inputs, *constants]) as counter:
        rank = generated.function(inputs)
        waiting = [next(rank)]
        for node, stop in zip(stops, generated.stops, strict=True):
            result = [_made_up(node, stop.op, stop.keywords, waiting.pop())]
            waiting.append(rank.send(result))
    del held
    return counter.peak


def _ones(node: fx.Node) -> torch.Tensor:
    return torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype)


def _made_up(node: fx.Node, op: Callable[..., Any], keywords: Sequence[str], arguments: tuple[Any, ...]) -> Any:
    if not is_primitive(node):
        count = len(arguments) - len(keywords)
        return op(*arguments[:count], **dict(zip(keywords, arguments[count:], strict=True)))
    name = node.target._schema.name  # type: ignore[union-attr]
    if name == "spmd::pcast":
        return arguments[0]
    if name == "spmd::shard":
        x, dim, size, _ = arguments
        return x.narrow(dim, 0, size).contiguous()
    meta = node.meta["val"]
    return torch.zeros(meta.shape, dtype=meta.dtype)
