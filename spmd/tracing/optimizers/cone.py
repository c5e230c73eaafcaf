"""The elementwise operations that compute a value, as a function that can be evaluated on numbers.

Parameters of one optimizer have cones that differ in nothing but the values: these are equal, and are examined once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.ir.graph import Operation, Value, iterate_leaves, map_leaves
from spmd.ir.number import Number, in_order

aten = torch.ops.aten

_DEPTH, _SIZE = 14, 64  # AdamW as torch writes it is 10 operations deep and has 20

_ANALYTIC = frozenset({
    "_to_copy", "add", "addcdiv", "addcmul", "div", "exp", "expm1", "lerp", "log", "log1p", "mul", "neg", "pow",
    "reciprocal", "rsqrt", "rsub", "sqrt", "square", "sub",
})  # fmt: skip
"""The operators of cones. Where two functions of these agree at random points, they agree everywhere, which does not
hold for operators like clamp and where, of which the points might see one piece only."""


class NotComputable(Exception):
    """A value that does not depend only on the given ones, or an operator that means something else for numbers."""


@attrs.frozen
class Node:
    """A node of a cone, by its number in it."""

    number: int


@attrs.frozen(eq=False, slots=False)
class Cone:
    """A value, and what computes it from values of the same shape and dtype, and from 0-d values.

    Args:
        values: the value of each node; the first is the one that is computed.
        operations: what computes each node; None for a node that is not computed here.
        numbers: the 0-d values that nodes are computed from.
        key: equal for cones that compute the same function.
        producers: the producer of each value of the program.
    """

    values: tuple[Value, ...]
    operations: tuple[Operation | None, ...]
    numbers: tuple[Value, ...]
    key: Any
    producers: Mapping[Value, Operation]

    @classmethod
    def of(cls, value: Value, producers: Mapping[Value, Operation]) -> Cone:
        """The cone of a value, of limited depth and size."""
        operations: list[Operation | None] = []
        numbers, depths, found = {value: 0}, [0], [value]
        for number, value in enumerate(found):  # `found` grows
            operation = producers.get(value)
            depth = depths[number] + 1
            if operation is None or depth > _DEPTH or len(found) > _SIZE or not _is_elementwise(operation):
                operations.append(None)
                continue
            for operand in operation.operands:
                if operand.meta == value.meta and operand not in numbers:
                    numbers[operand] = len(found)
                    found.append(operand)
                    depths.append(depth)
            operations.append(operation)
        return cls(tuple(found), tuple(operations), *_numbered(operations, numbers, producers), producers)

    @cached_property
    def calls(self) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]] | None]:
        """The operator and arguments of each node, which have a `Node` for each operand that is one."""
        numbers = {value: Node(number) for number, value in enumerate(self.values)}
        take = lambda value: numbers.get(value, value)  # noqa: E731
        return [None if o is None else (o.op, *o.form.filled(list(map(take, o.operands)))) for o in self.operations]

    def operands(self, number: int) -> tuple[int, ...]:
        """The nodes that a node is computed from, without repetitions."""
        call = self.calls[number]
        return tuple(dict.fromkeys(leaf.number for leaf in _leaves(call) if isinstance(leaf, Node)))

    def inside(self, root: int, ends: frozenset[int]) -> frozenset[int] | None:
        """The nodes that are computed between a node, which is one of them, and `ends`; None if others are needed."""
        found, left = set(), [root]
        while left:
            number = left.pop()
            if number in ends or number in found:
                continue
            if not self.operands(number):
                return None
            found.add(number)
            left += self.operands(number)
        return frozenset(found)

    def scalars(self, nodes: frozenset[int]) -> tuple[Value | Number, ...]:
        """The 0-d values that nodes are computed from, directly or through elementwise operations on 0-d values.

        And the dynamic numbers that they and the nodes are computed from.
        """
        leaves = [leaf for number in sorted(nodes) for leaf in _leaves(self.calls[number])]
        found = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Value))
        numbers = [leaf for leaf in leaves if isinstance(leaf, Number)]
        left = list(found)
        while left and len(found) < _SIZE:
            operation = self.producers.get(left.pop())
            if operation is not None and _is_elementwise(operation):
                left += [operand for operand in operation.operands if operand not in found]
                found |= dict.fromkeys(operation.operands)
                numbers += [leaf for leaf in _leaves(_call_of(operation)) if isinstance(leaf, Number)]
        return (*found, *in_order(numbers))

    def evaluate(
        self, root: int, given: Mapping[int, Tensor], scalars: Mapping[Value | Number, Tensor] | None = None
    ) -> Tensor:
        """The numbers of a node for given ones of other nodes and of scalars, each a float64 vector.

        Raises:
            NotComputable: they do not determine it.
        """
        known: dict[Any, Tensor] = {**given, **(scalars or {})}

        def number_of(key: int | Value | Number) -> Any:
            if key in known:
                return known[key]
            if isinstance(key, Number):
                known[key] = _compute(key, number_of)
            else:
                known[key] = _run(self._call(key), lambda leaf: number_of(_key(leaf)))
            return known[key]

        return number_of(root)

    def _call(self, key: int | Value) -> tuple[Any, Any, Any] | None:
        if isinstance(key, int):
            return self.calls[key]
        operation = _producer_of_number(key, self.producers)
        return None if operation is None else _call_of(operation)


def _numbered(
    operations: Sequence[Operation | None], nodes: Mapping[Value, int], producers: Mapping[Value, Operation]
) -> tuple[tuple[Value, ...], Any]:
    """The 0-d values that nodes are computed from, and a key of the nodes, which has their places for them.

    So the parameters of a fused optimizer, of which each has its own number of steps, have equal keys.
    """
    places: dict[Value, int] = {}
    numbers: list[Value] = []

    def place(operand: Value) -> tuple[bool, int]:
        if operand in nodes:
            return True, nodes[operand]
        if operand not in places:
            places[operand] = len(numbers)
            numbers.append(operand)
        return False, places[operand]

    def key_of(operation: Operation | None) -> Any:
        return operation and (operation.form, tuple(map(place, operation.operands)))

    key: list[Any] = [key_of(operation) for operation in operations]
    for number in numbers:  # which grows
        key.append(number if len(numbers) > _SIZE else (number.meta, key_of(_producer_of_number(number, producers))))
    return tuple(numbers), tuple(key)


def _producer_of_number(number: Value, producers: Mapping[Value, Operation]) -> Operation | None:
    operation = producers.get(number)
    return operation if operation and (_is_elementwise(operation) or operation.op is aten.full.default) else None


def _call_of(operation: Operation) -> tuple[Any, Any, Any]:
    return operation.op, operation.args, dict(operation.kwargs)


def _compute(number: Number, number_of: Any) -> Any:
    """What a dynamic number is for the numbers that it is computed from."""
    if number.op is None:
        raise NotComputable
    try:
        return number.op(*(number_of(arg) if isinstance(arg, Number) else arg for arg in number.args))
    except (RuntimeError, TypeError):  # a function of one number, such as math.sqrt
        raise NotComputable from None


def _key(leaf: Node | Value | Number) -> int | Value | Number:
    return leaf.number if isinstance(leaf, Node) else leaf


def _run(call: tuple[Any, Any, Any] | None, number_of: Any) -> Tensor:
    if call is None:
        raise NotComputable
    op, args, kwargs = call
    if op is aten.full.default and not args[0]:
        return torch.tensor(args[1], dtype=torch.float64)
    if op is aten._to_copy.default and "dtype" in kwargs and kwargs["dtype"].is_floating_point:
        return number_of(args[0])  # type: ignore[no-any-return]
    if op is aten._to_copy.default or "rounding_mode" in kwargs:
        raise NotComputable
    concrete = lambda leaf: number_of(leaf) if isinstance(leaf, (Node, Value, Number)) else leaf  # noqa: E731
    if any(isinstance(leaf, Number) for leaf in iterate_leaves((args, kwargs))):
        op, args, kwargs = _of_tensors(op, args, kwargs)
    try:
        return op(*map_leaves(concrete, args), **map_leaves(concrete, kwargs))  # type: ignore[no-any-return]
    except (RuntimeError, TypeError, NotImplementedError):  # an operator of integers, for one
        raise NotComputable from None


def _of_tensors(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A call with dynamic numbers as one in which tensors may replace them."""
    factor = next((name for name in ("alpha", "value") if isinstance(kwargs.get(name), Number)), None)
    if factor is None:
        return op.overloadpacket, args, kwargs
    scaled = lambda *given, by: op.overloadpacket(given[0], given[1] * by, *given[2:])  # noqa: E731
    return scaled, args, {"by": kwargs[factor]} if len(kwargs) == 1 else kwargs


def _leaves(tree: Any) -> Iterator[Any]:
    """Nodes, values and dynamic numbers among the arguments of a call."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    elif isinstance(tree, (Node, Value, Number)):
        yield tree


def _is_elementwise(operation: Operation) -> bool:
    """Whether an operation computes each element of its result from 0-d values and elements at the same place."""
    if not isinstance(operation.op, torch._ops.OpOverload) or len(operation.results) != 1:
        return False
    (result,) = operation.tensors
    metas = [operand.meta for operand in operation.operands]
    fits = all(meta.ndim == 0 or meta == result.meta for meta in metas) and bool(metas)
    fits = fits and (result.meta.ndim == 0 or result.meta in metas)
    return fits and operation.op.namespace == "aten" and operation.name in _ANALYTIC
