"""Splits a program that computes results and their gradients into a forward and a backward program.

As in the default partition of torch's AOTAutograd, what the results need is forward, and the backward program reads
what it needs of that: no operation runs twice, but for views and constants, which cost less than to keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs
import torch

from spmd.ir.graph import Graph, Operation, Value, freeze


@attrs.frozen(eq=False)
class Joint:
    """A program of results and gradients.

    Args:
        graph: its inputs are primals, followed by cotangents; its outputs are results, followed by gradients.
        primals, results: how many of them there are.
    """

    graph: Graph
    primals: int
    results: int

    def forward(self, saved: Sequence[Value]) -> Graph:
        """The program from the primals to the results, followed by the values `saved`."""
        inputs, results = self.graph.inputs[: self.primals], self.graph.outputs[: self.results]
        return _program(self.graph, inputs, self._forward_operations(), (*results, *saved))

    @property
    def reads(self) -> tuple[Value, ...]:
        """What the backward program reads: primals, results and other values of the forward program."""
        forward = set(self._forward_operations())
        producers = {value: operation for operation in self.graph.operations for value in operation.tensors}

        def stops(value: Value) -> bool:
            producer = producers.get(value)
            light = producer is not None and (producer.is_view or not producer.operands) and producer.effect is None
            return producer in forward and not light

        known = {*self.graph.inputs, *self.graph.outputs[: self.results]}
        return self._backward_operations(lambda value: value in known or stops(value))[1]

    def backward(self, available: Iterable[Value]) -> tuple[Graph, tuple[Value, ...]]:
        """The program to the gradients.

        Args:
            available: primals, and values of the forward program.

        Returns:
            The program, and what it reads of `available`: its first inputs. The others are the cotangents.
        """
        known = set(available)
        operations, reads = self._backward_operations(known.__contains__)
        inputs = (*reads, *self.graph.inputs[self.primals :])
        return _program(self.graph, inputs, operations, self.graph.outputs[self.results :]), reads

    def corresponding(self, other: Joint) -> dict[Value, Value]:
        """The values of another program of the same function, for those of this one that it computes in the same way.

        Both compute the results first; after that they may differ, as their cotangents do.
        """
        found = dict(zip(self.graph.inputs[: self.primals], other.graph.inputs[: other.primals], strict=True))
        constants = zip(self.graph.constants, other.graph.constants, strict=False)
        found |= {mine: its for (mine, tensor), (its, twin) in constants if _are_same(tensor, twin)}
        for mine, its in zip(self.graph.operations, other.graph.operations, strict=False):
            same = mine.substitute(found)
            calls = [freeze((operation.args, dict(operation.kwargs))) for operation in (same, its)]
            if mine.op is not its.op or calls[0] != calls[1] or len(mine.results) != len(its.results):
                break
            found |= {a: b for a, b in zip(mine.results, its.results, strict=True) if a is not None and b is not None}
        return found

    def _late(self) -> set[Value]:
        """The values that depend on cotangents."""
        late = set(self.graph.inputs[self.primals :])
        for operation in self.graph.operations:
            if not late.isdisjoint(operation.operands):
                late.update(operation.tensors)
        return late

    def _forward_operations(self) -> list[Operation]:
        """The operations that the results need, and those with effects that need no cotangent."""
        late, live = self._late(), set(self.graph.outputs[: self.results])
        found = []
        for operation in reversed(self.graph.operations):
            has_effect = operation.effect is not None and late.isdisjoint(operation.operands)
            if has_effect or not live.isdisjoint(operation.tensors):
                live.update(operation.operands)
                found.append(operation)
        return found[::-1]

    def _backward_operations(self, stops: Callable[[Value], bool]) -> tuple[list[Operation], tuple[Value, ...]]:
        """The operations that the gradients need, from values at which the search stops, and these values."""
        late = self._late()
        wanted = {value for value in self.graph.outputs[self.results :] if not stops(value)}
        reads = dict.fromkeys(value for value in self.graph.outputs[self.results :] if stops(value))
        found = []
        for operation in reversed(self.graph.operations):
            has_effect = operation.effect is not None and not late.isdisjoint(operation.operands)
            if has_effect or not wanted.isdisjoint(operation.tensors):
                found.append(operation)
                for value in operation.operands:
                    reads.update({value: None} if stops(value) else {})
                    wanted.update([] if stops(value) else [value])
        cotangents = self.graph.inputs[self.primals :]
        return found[::-1], tuple(value for value in reads if value not in cotangents)


def _are_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two constants are one tensor, or of the same numbers, as of `torch.tensor([1.0])` traced twice."""
    if tensor is other or (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return tensor is other
    differs = (tensor != other) & ((tensor == tensor) | (other == other))  # NaNs are the same
    return not bool(differs.any())


def _program(joint: Graph, inputs: Sequence[Value], operations: Sequence[Operation], outputs: Sequence[Value]) -> Graph:
    used = {*outputs, *(value for operation in operations for value in operation.operands)}
    constants = tuple((value, tensor) for value, tensor in joint.constants if value in used and value not in inputs)
    again = {value: Value(f"{value.name}_again", value.meta) for value in inputs}  # of an operation with other results
    made = [attrs.evolve(o, results=tuple(again.get(v, v) if v else None for v in o.results)) for o in operations]
    return Graph(tuple(inputs), constants, tuple(made), tuple(outputs)).verify()
