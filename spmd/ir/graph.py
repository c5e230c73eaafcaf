"""The program as passed between compiler stages: a flat list of functional operators, in order of execution.

Everything here is immutable. Values and operations compare by identity: values of equal shape and dtype are different.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.ir.call import Call
from spmd.ir.random_operators import is_random


@attrs.frozen
class Source:
    """The line of the user's code that an operation comes from; a backward operation has that of its forward one."""

    file: str
    line: int
    code: str = ""
    backward: bool = False

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}{' (backward)' if self.backward else ''}"


@attrs.frozen(eq=False)
class Value:
    """One tensor of the program."""

    name: str
    meta: TensorMeta

    def __repr__(self) -> str:
        return f"%{self.name}: {self.meta}"


@attrs.frozen(eq=False, slots=False)  # cached properties of a class with slots are slow
class Operation:
    """One call of one operator.

    Args:
        op: the operator.
        args, kwargs: its arguments; tensors are `Value`s, also inside (nested) lists.
        results: its tensor outputs in order; None where the operator returns None.
        source: the line of the user's code that it comes from, if known.
        group: a number that the operations from one list operator (`_foreach_*`) share; lowering joins these
            operations into list operators.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Value | None, ...]
    source: Source | None = None
    group: int | None = None

    @cached_property
    def operands(self) -> tuple[Value, ...]:
        """The tensor arguments in order of appearance (with repetitions)."""
        return tuple(leaf for leaf in iterate_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Value))

    @cached_property
    def tensors(self) -> tuple[Value, ...]:
        """The results without the Nones."""
        return tuple(result for result in self.results if result is not None)

    @property
    def name(self) -> str:
        """The operator's name without its overload: `mm`."""
        return self.op.overloadpacket.__name__  # type: ignore[no-any-return]

    @property
    def is_view(self) -> bool:
        """Whether the operator is a view operator: its schema says that a result aliases an argument."""
        return _is_view(self.op)

    @cached_property
    def is_random(self) -> bool:
        """Whether it draws random numbers, so that it must run once, unsharded and in program order."""
        return is_random(self.op, self.args, self.kwargs)

    def with_operands(self, replace: Callable[[Value], Value]) -> Operation:
        """A copy with `replace` applied to each operand; the operation itself if no operand changes."""
        taken = [replace(operand) for operand in self.operands]
        if all(map(operator.is_, taken, self.operands)):
            return self
        operands = iter(taken)
        take = lambda leaf: next(operands) if isinstance(leaf, Value) else leaf  # noqa: E731
        return attrs.evolve(self, args=map_leaves(take, self.args), kwargs=map_leaves(take, dict(self.kwargs)))

    def call(self, meta: Callable[[Value], TensorMeta] = lambda value: value.meta) -> Call:
        """This call as sharding rules see it: each value replaced by its meta."""
        replace = lambda leaf: meta(leaf) if isinstance(leaf, Value) else leaf  # noqa: E731
        return Call(
            self.op,
            map_leaves(replace, self.args),
            map_leaves(replace, dict(self.kwargs)),
            tuple(meta(value) for value in self.tensors),
        )

    def __repr__(self) -> str:
        arguments = [_text(argument) for argument in self.args]
        arguments += [f"{name}={_text(argument)}" for name, argument in self.kwargs.items()]
        return f"{', '.join(map(str, self.results))} = {self.op}({', '.join(arguments)})"


@attrs.frozen(eq=False)
class Graph:
    """A functional program over global tensors.

    Args:
        inputs: the tensor arguments, flattened.
        constants: the tensors that the function closes over, each with its `Value` in the program.
        operations: in order of execution.
        outputs: the results, flattened.
    """

    inputs: tuple[Value, ...]
    constants: tuple[tuple[Value, torch.Tensor], ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Value, ...]

    def __str__(self) -> str:
        lines = [f"inputs {', '.join(map(repr, self.inputs))}"]
        lines += [f"constant {value!r}" for value, _ in self.constants]
        lines += [f"{operation!r}  # {operation.source}" for operation in self.operations]
        return "\n".join([*lines, f"outputs {', '.join(map(repr, self.outputs))}"])

    def verify(self) -> Graph:
        """Return the graph; TraceError unless every value is defined exactly once and before its consumers."""
        defined: set[Value] = set()
        for value in (*self.inputs, *(value for value, _ in self.constants)):
            _define(value, defined)
        for operation in self.operations:
            for operand in operation.operands:
                if operand not in defined:
                    raise TraceError(f"{operand!r} is used before it is defined, in {operation!r}.")
            for value in operation.tensors:
                _define(value, defined)
        for value in self.outputs:
            if value not in defined:
                raise TraceError(f"Output {value!r} is not defined by the program.")
        return self


@lru_cache(maxsize=4096)
def _is_view(op: torch._ops.OpOverload) -> bool:
    return any(argument.alias_info is not None for argument in op._schema.arguments)


def _define(value: Value, defined: set[Value]) -> None:
    if value in defined:
        raise TraceError(f"{value!r} is defined twice.")
    defined.add(value)


def _text(argument: Any) -> str:
    return str(map_leaves(lambda leaf: f"%{leaf.name}" if isinstance(leaf, Value) else leaf, argument))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf of nested tuples, lists and dicts, the only containers in arguments."""
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_leaves(function, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_leaves(function, item) for key, item in tree.items()}
    return function(tree)


def iterate_leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from iterate_leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from iterate_leaves(item)
    else:
        yield tree


def freeze(tree: Any) -> Any:
    """A hashable key for operator arguments: equal for equal arguments, where 1, 1.0 and True count as different."""
    if isinstance(tree, (tuple, list)):
        return tuple(freeze(item) for item in tree)
    if isinstance(tree, dict):
        return tuple((key, freeze(tree[key])) for key in sorted(tree))
    return tree if isinstance(tree, (Value, TensorMeta)) else (type(tree), repr(tree))
