"""The pass that lets operators write into the memory of donated inputs, and the functions that the program then calls.

The program says where an operator may write: into an operand that comes from a donated input and that nothing in the
program reads later. Whether it does is decided when it runs, as the caller or another rank of a virtual mesh may hold
the tensor, or a tensor with the same memory. Then the result is a new tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch

from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.in_place import GRADIENTS, in_place_variant, returned_lists, rewritable
from spmd.ir.list_operators import FUSED

OpOverload = torch._ops.OpOverload
Tensors = list[torch.Tensor]


def write_in_place(graph: Graph, donated: Iterable[int]) -> Graph:
    """Let operators write into the memory of donated inputs; fused optimizers are always called by their `InPlace`.

    Args:
        graph: a rank's program.
        donated: the positions of the donated inputs.
    """
    writable = {graph.inputs[position] for position in donated}
    if not writable and all(operation.op not in FUSED for operation in graph.operations):
        return graph
    last = {value: operation for operation in graph.operations for value in operation.operands}
    last |= dict.fromkeys(graph.outputs)  # type: ignore[arg-type]
    operations = []
    for operation in graph.operations:
        pairs = rewritable(operation)
        found = {a: b for a, b in pairs if a in writable and last[a] is operation}
        writable.update(found.values())
        if found or operation.op in FUSED:
            free = tuple(a in found for a in _first_operands(operation))
            operation = attrs.evolve(operation, op=InPlace(operation.op, free))
        operations.append(operation)
    return attrs.evolve(graph, operations=tuple(operations))


def _first_operands(operation: Operation) -> list[Any]:
    """What the in-place variant of an operator would write to, in order."""
    if operation.op in FUSED:
        lists = operation.args[: returned_lists(operation.op)]
        return [value for position, values in enumerate(lists) if position != GRADIENTS for value in values]
    first = operation.args[0]
    return [first] if isinstance(first, Value) else list(first)


@attrs.frozen
class InPlace:
    """An operator that may write its results into the memory of operands; called itself, it writes to none.

    Args:
        op: the operator.
        free: for each tensor that the in-place variant writes to, whether the program permits it.
    """

    op: OpOverload
    free: tuple[bool, ...]

    @property
    def __name__(self) -> str:
        name = self.op.overloadpacket.__name__
        return f"{name}_" if any(self.free) else name

    @property
    def takes_lists(self) -> bool:
        """Whether it takes lists of tensors; if not, `bound` takes a list with the first operand."""
        return len(self.op._schema.arguments) > 0 and str(self.op._schema.arguments[0].type) == "List[Tensor]"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.op in FUSED:
            return _fused(self.op, (False,) * len(self.free), *map(_copied, args), **kwargs)
        return self.op(*args, **kwargs)

    def bound(self, functional: Callable[..., Any], in_place: Callable[..., Any]) -> Callable[..., Any]:
        """The function for the program that a runtime generates, in which a variable holds each operand.

        Args:
            functional: what calls the operator.
            in_place: what calls its in-place variant.
        """
        free = self.free

        def single(first: Tensors, *args: Any, **kwargs: Any) -> Any:
            return (in_place if is_owned(first, 0) else functional)(first[0], *args, **kwargs)

        def each(tensors: Tensors, *args: Any, **kwargs: Any) -> Any:
            owned = [allowed and is_owned(tensors, index) for index, allowed in enumerate(free)]
            if not any(owned):
                return functional(tensors, *args, **kwargs)
            for index, is_own in enumerate(owned):
                if not is_own:
                    tensors[index] = tensors[index].clone()
            in_place(tensors, *args, **kwargs)
            return tensors

        def fused(*args: Any, **kwargs: Any) -> Any:
            return _fused(self.op, free, *args, **kwargs)

        return fused if self.op in FUSED else each if self.takes_lists else single


def _copied(argument: Any) -> Any:
    return list(argument) if isinstance(argument, (list, tuple)) else argument


def _fused(op: OpOverload, free: Sequence[bool], *args: Any, **kwargs: Any) -> list[torch.Tensor | None]:
    """The results of a fused optimizer, flat, with None for gradients.

    Its kernels take all tensors of a parameter for memory in the same order, without a look at strides.
    """
    in_place, allowed = in_place_variant(op), iter(free)
    results: list[torch.Tensor | None] = []
    for position, tensors in enumerate(args[: returned_lists(op)]):
        if position == GRADIENTS:
            tensors[:] = [tensor.contiguous() for tensor in tensors]
            results += [None] * len(tensors)
            continue
        for index in range(len(tensors)):
            if not (next(allowed) and is_owned(tensors, index)):
                tensors[index] = tensors[index].clone(memory_format=torch.contiguous_format)
        results += tensors
    in_place(*args, **kwargs)  # type: ignore[misc]
    return results


_REFERENCES = 3
"""To a tensor that nobody else holds: of the program's variable, of the list, and of the argument of `getrefcount`."""

_storage_uses: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]


def is_owned(tensors: Tensors, index: int) -> bool:
    """Whether only one variable and this list hold a tensor, which is contiguous and alone in its whole memory."""
    if sys.getrefcount(tensors[index]) != _REFERENCES or tensors[index]._use_count() != 1:  # type: ignore[attr-defined]
        return False
    tensor = tensors[index]
    memory = tensor.untyped_storage()
    return (
        _storage_uses(memory._cdata) == 2  # of the tensor, and of `memory`
        and memory.nbytes() == tensor.nbytes
        and tensor.is_contiguous()
        and memory.resizable()  # else it is not torch's, but numpy's, for one
        and (tensor.is_cuda or not memory.is_shared())  # with other processes; for CUDA, torch always says so
    )
