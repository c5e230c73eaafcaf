"""Replaces the elementwise operations of an optimizer's step by torch's fused optimizer.

A step is recognised by what it computes (`formulas`), however it is written: by list operators or not, by this library,
by torch or by hand. The fused operator computes the same up to rounding, in one pass over memory. Steps of half
precision stay: the fused operator would round less often.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from spmd.core.spec import TensorMeta
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.names import Namer
from spmd.ir.simplify import eliminate_dead
from spmd.tracing.optimizers import formulas
from spmd.tracing.optimizers.cone import Cone
from spmd.tracing.optimizers.formulas import OptimizerStep

aten = torch.ops.aten

_DTYPES = (torch.float32, torch.float64)
FUSED_DEVICES = frozenset(_get_fused_kernels_supported_devices())
"""The types of devices that have torch's fused optimizers."""

_LONGEST = 8
"""The most operations between a square root and the new parameter, or a momentum buffer and the new parameter."""

_STEP_DTYPE = torch.float32
"""The dtype of the numbers of steps and of learning rates that torch's kernels read."""


def fuse_optimizers(graph: Graph) -> Graph:
    """The program with fused optimizers for the elementwise operations that compute the same.

    Args:
        graph: a canonical program.

    Returns:
        The program; parameters with the same constants are in one group (`Operation.group`). A step of which
        something else reads an intermediate value stays as it is.
    """
    return graph if graph.variants is not None else _Recognition(graph).run()


class _Recognition:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.namer = graph, Namer(graph.names)
        self.outputs = frozenset(graph.outputs)
        self.position = {operation: index for index, operation in enumerate(graph.operations)}
        self.producers = dict(graph.producers)
        self.readers: dict[Value, list[Operation]] = {}
        for operation in graph.operations:
            for value in dict.fromkeys(operation.operands):
                self.readers.setdefault(value, []).append(operation)
        self.known: dict[Any, tuple[Cone, tuple[OptimizerStep, ...]]] = {}
        self.fused: dict[Operation, tuple[Cone, OptimizerStep]] = {}  # by the operation that computes the new parameter
        self.replaced: set[Operation] = set()

    def run(self) -> Graph:
        for operation in self.graph.operations:
            if _is_root(operation):
                self.find(operation.tensors[0], formulas.adam)
        for value in self.graph.outputs:
            if value.meta.ndim and value.meta.dtype in _DTYPES:
                self.find(value, formulas.momentum)
        return self.rewritten() if self.fused else self.graph

    def find(self, value: Value, examine: Any) -> None:
        """Note the step after a value: the first one after a momentum buffer, the last one after a square root.

        An update with its decay, which is still to be added to the parameter, is a step of the decay.
        """
        last: tuple[Cone, OptimizerStep] | None = None
        for param in self.after(value, several=examine is formulas.momentum):
            if self.producers.get(param) in (None, *self.replaced):
                continue
            if examine is formulas.momentum and param not in self.outputs:
                continue
            cone = Cone.of(param, self.producers)
            if value not in cone.values:
                break
            number = cone.values.index(value)
            key = examine, number, cone.key
            if key not in self.known:
                self.known[key] = cone, tuple(examine(cone, number))
            examined, steps = self.known[key]
            numbers = dict(zip(examined.numbers, cone.numbers, strict=True))
            here = (step.of(numbers) for step in steps)
            step = next((step for step in here if self.is_whole(cone, step)), None)
            last = last if step is None else (cone, step)
            if last and examine is formulas.momentum:
                break
        if last:
            self.note(*last)

    def after(self, value: Value, several: bool) -> Iterator[Value]:
        """Values that are computed from a value, each from the one before, which has no other consumer."""
        first = self.readers.get(value, [])
        for reader in first if several else first[:1] if len(first) == 1 else ():
            for _ in range(_LONGEST):
                if len(reader.results) != 1 or reader.tensors[0].meta != value.meta:
                    break
                (result,) = reader.tensors
                yield result
                readers = self.readers.get(result, [])
                if len(readers) != 1 or result in self.outputs:
                    break
                (reader,) = readers

    def is_whole(self, cone: Cone, step: OptimizerStep) -> bool:
        """Whether nothing outside of a step reads what it computes on the way, or reads results before its end."""
        values = {number: cone.values[number] for number in step.inside}
        ends = [cone.values[number] for number in (0, *step.new_states)]
        operations = {self.producers[value] for value in (*values.values(), *ends)}
        if not self.replaced.isdisjoint(operations):
            return False
        end = self.position[self.producers[cone.values[0]]]
        for number, value in values.items():
            if number and (value in self.outputs or not operations.issuperset(self.readers.get(value, []))):
                return False
        later = (reader for value in ends for reader in self.readers.get(value, []) if reader not in operations)
        return all(self.position[reader] > end for reader in later) and self.fits(cone, step)

    def fits(self, cone: Cone, step: OptimizerStep) -> bool:
        """Whether the kernels take the step's learning rate without a loss of digits."""
        dtype = cone.values[0].meta.dtype
        return not isinstance(step.rate, Value) or dtype is _STEP_DTYPE or step.rate.meta.dtype is _STEP_DTYPE

    def note(self, cone: Cone, step: OptimizerStep) -> None:
        self.fused[self.producers[cone.values[0]]] = cone, step
        self.replaced.update(self.producers[cone.values[number]] for number in (*step.inside, *step.new_states))
        for number in (0, *step.new_states):
            del self.producers[cone.values[number]]  # later cones end here

    def rewritten(self) -> Graph:
        group = 1 + max((operation.group or 0 for operation in self.graph.operations), default=0)
        states = {cone.values[number] for cone, step in self.fused.values() for number in step.new_states}
        groups = _Groups(group)
        casts: dict[Value, Value] = {}
        operations: list[Operation] = []

        def cast(value: Value) -> Value:
            if value.meta.dtype is _STEP_DTYPE:
                return value
            if value not in casts:
                casts[value] = Value(self.namer.fresh(f"{value.name}_single"), TensorMeta((), _STEP_DTYPE))
                operation = Operation(aten._to_copy.default, (value,), {"dtype": _STEP_DTYPE}, (casts[value],))
                operations.append(operation)
            return casts[value]

        for operation in self.graph.operations:
            if operation in self.fused:
                operation = _call(operation, *self.fused[operation], cast)
                operation = attrs.evolve(operation, group=groups.of(operation))
            elif not states.isdisjoint(operation.tensors):
                continue
            groups.add(operation)
            operations.append(operation)
        return eliminate_dead(attrs.evolve(self.graph, operations=tuple(operations))).verify()


def _is_root(operation: Operation) -> bool:
    op, args = operation.op, operation.args
    is_root = op is aten.sqrt.default or (op is aten.pow.Tensor_Scalar and args[1] == 0.5)
    return is_root and operation.tensors[0].meta.ndim > 0 and operation.tensors[0].meta.dtype in _DTYPES


def _call(operation: Operation, cone: Cone, step: OptimizerStep, cast: Any) -> Operation:
    """The fused operator of one parameter, in place of the operation that computes the new parameter."""
    value = cone.values.__getitem__
    args: list[list[Value]] = [[value(step.param)], [value(step.gradient)], *([value(n)] for n in step.states)]
    if step.step is not None:
        args += [[], [cast(step.step)]]
    rate = cast(step.rate) if isinstance(step.rate, Value) else step.rate
    options = dict(step.options) if rate is None else {**step.options, "lr": rate}
    return Operation(
        getattr(getattr(aten, step.name), "tensor_lr" if isinstance(rate, Value) else "default"),
        tuple(args),
        options,
        (value(0), None, *map(value, step.new_states)),
        operation.source,
    )


class _Groups:
    """The groups of fused optimizers: a call in one does not depend on another call in it."""

    def __init__(self, first: int) -> None:
        self.next = first
        self.of_key: dict[Any, int] = {}
        self.before: dict[Value, frozenset[int]] = {}

    def of(self, operation: Operation) -> int:
        """The group of a call of a fused optimizer."""
        key = operation.op, operation.operands[0].meta.dtype, tuple(operation.kwargs.items())
        if self.of_key.get(key) in (None, *self.behind(operation)):
            self.of_key[key] = self.next
            self.next += 1
        return self.of_key[key]

    def add(self, operation: Operation) -> None:
        """Note an operation; those that come before it are noted."""
        own = {group for group in self.of_key.values() if group == operation.group}
        self.before.update(dict.fromkeys(operation.tensors, self.behind(operation) | own))

    def behind(self, operation: Operation) -> frozenset[int]:
        """The groups that an operation depends on."""
        found: frozenset[int] = frozenset()
        return found.union(*(self.before.get(operand, found) for operand in operation.operands))
