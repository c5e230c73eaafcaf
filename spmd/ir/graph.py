"""The program as passed between compiler stages: a flat list of functional operators, in order of execution.

The global program, which is traced and planned, and the program of a rank, which is lowered and run, have this form.
Everything here is immutable. Values and operations compare by identity: values of equal shape and dtype are different.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.ir.call import Call
from spmd.ir.comm import Comm
from spmd.ir.effects import Effect, effect_of
from spmd.ir.number import Number
from spmd.ir.regions import END, OTHERWISE, Regions
from spmd.ir.source import Source
from spmd.ir.variants import Variants

Operator: TypeAlias = torch._ops.OpOverload | Callable[..., Any]
"""What an operation calls: an operator of torch; in a rank's program also a Python function of tensors."""


@attrs.frozen(eq=False)
class Value:
    """One tensor of the program; in the program of a rank, its local tensor."""

    name: str
    meta: TensorMeta

    def __repr__(self) -> str:
        return f"%{self.name}: {self.meta}"


@attrs.frozen
class Annotations:
    """What lowering knows of an operation in a rank's program, beside the call itself.

    Args:
        comm: of a collective: its record.
        repetition: the number of earlier computations of a rematerialized value; equal calls with different numbers are
            not merged.
        tuple_name: the name of the tuple of results in the program's text, if the operator returns a tuple.
        origin: the planned operation that it runs for. Of equal calls, which are merged, it is the first; of a list
            operator, it is the first element.
    """

    comm: Comm | None = None
    repetition: int = 0
    tuple_name: str = ""
    origin: Operation | None = None


NOT_ANNOTATED = Annotations()


@attrs.frozen
class OperandNumber:
    """The place of an operand in a form, by its position among the operands of a call."""

    number: int


@attrs.frozen(eq=False, slots=False)
class Form:
    """A call without its operands; equal for calls with equal arguments beside tensors.

    Args:
        op: the operator.
        args, kwargs: its arguments, with an `OperandNumber` for each tensor.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def key(self) -> Hashable:
        """The arguments, hashable."""
        return freeze((self.args, self.kwargs))

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.key))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and (
            self is other or (self._hash == other._hash and self.op is other.op and self.key == other.key)
        )

    def filled(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these in place of the operands."""
        fill = lambda leaf: operands[leaf.number] if isinstance(leaf, OperandNumber) else leaf  # noqa: E731
        return map_leaves(fill, self.args), map_leaves(fill, self.kwargs)


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
        annotations: what lowering knows of it.
    """

    op: Any  # an Operator; any, because stages differ in which operators they have
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Value | None, ...]
    source: Source | None = None
    group: int | None = None
    annotations: Annotations = NOT_ANNOTATED

    @cached_property
    def operands(self) -> tuple[Value, ...]:
        """The tensor arguments in order of appearance (with repetitions)."""
        return tuple(leaf for leaf in iterate_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Value))

    @cached_property
    def form(self) -> Form:
        """The call without its operands."""
        numbers = itertools.count()
        take = lambda leaf: OperandNumber(next(numbers)) if isinstance(leaf, Value) else leaf  # noqa: E731
        return Form(self.op, *map_leaves(take, (self.args, dict(self.kwargs))))

    @cached_property
    def tensors(self) -> tuple[Value, ...]:
        """The results without the Nones."""
        return tuple(result for result in self.results if result is not None)

    @property
    def metas(self) -> tuple[TensorMeta | None, ...]:
        """Those of its operands, and of its results, with the Nones."""
        return tuple(None if value is None else value.meta for value in (*self.operands, *self.results))

    @property
    def name(self) -> str:
        """The operator's name without its overload: `mm`."""
        return getattr(self.op, "overloadpacket", self.op).__name__  # type: ignore[no-any-return]

    @cached_property
    def is_view(self) -> bool:
        """Whether the operator is one of torch's view operators: its schema says that a result aliases an argument."""
        return isinstance(self.op, torch._ops.OpOverload) and _is_view(self.op)

    @property
    def returns_tuple(self) -> bool:
        """Whether the operator returns a tuple or list, also of one tensor; a Python function does for several."""
        return _returns_tuple(self.op) if isinstance(self.op, torch._ops.OpOverload) else len(self.results) > 1

    @cached_property
    def effect(self) -> Effect | None:
        """What it does beside computing its results; None if nothing."""
        return effect_of(self.op, self.args, self.kwargs)

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers, so that it must run once, unsharded and in program order."""
        return self.effect is Effect.RANDOM

    def with_operands(self, replace: Callable[[Value], Value], **changes: Any) -> Operation:
        """A copy with `replace` applied to each operand and other changes; the operation itself if nothing changes.

        It has the same form, which is computed once for all copies.
        """
        operands = tuple([replace(operand) for operand in self.operands])
        if not changes and all(map(operator.is_, operands, self.operands)):
            return self
        args, kwargs = self.form.filled(operands)
        copy = attrs.evolve(self, args=args, kwargs=kwargs, **changes)
        vars(copy).update(form=self.form, operands=operands)
        return copy

    def substitute(self, replaced: Mapping[Value, Value]) -> Operation:
        """A copy with operands replaced; the operation itself if none of its operands is among the keys."""
        if replaced.keys().isdisjoint(self.operands):
            return self
        return self.with_operands(lambda value: replaced.get(value, value))

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


@attrs.frozen(eq=False, slots=False)  # as Operation
class Graph:
    """A functional program over global tensors, or over the local tensors of a rank.

    Args:
        inputs: the tensor arguments, flattened.
        constants: the tensors that the function closes over, each with its `Value` in the program.
        operations: in order of execution.
        outputs: the results, flattened.
        specs: in the program of a rank, the sharding of the values that are shards of a global value, for its text.
        planned: in the program of a rank, the local tensor of each value of the plan.
        variants: in a global program, what differs for ranks whose shards in a manual region have other shapes than
            those of coordinate zero; None if nothing does.
    """

    inputs: tuple[Value, ...]
    constants: tuple[tuple[Value, torch.Tensor], ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Value, ...]
    specs: Mapping[Value, object] = MappingProxyType({})
    planned: Mapping[Value, Value] = MappingProxyType({})
    variants: Variants[Graph] | None = None

    @cached_property
    def producers(self) -> Mapping[Value, Operation]:
        """The operation that each value is a result of; inputs and constants have none."""
        return MappingProxyType(producers_of(self.operations))

    @cached_property
    def consumers(self) -> Mapping[Value, tuple[Operation, ...]]:
        """The operations that each value is an operand of, in order; values without any are left out."""
        found: dict[Value, list[Operation]] = {}
        for operation in self.operations:
            for value in dict.fromkeys(operation.operands):
                found.setdefault(value, []).append(operation)
        return MappingProxyType({value: tuple(operations) for value, operations in found.items()})

    @cached_property
    def reads(self) -> Counter[Value]:
        """How often each value is an operand or a result of the program."""
        return Counter([*self.outputs, *(value for operation in self.operations for value in operation.operands)])

    @cached_property
    def regions(self) -> Regions[Operation, Value]:
        """Its loops and branches."""
        return Regions(self.operations)

    def origin(self, value: Value, skips: Callable[[Operation], bool]) -> Value:
        """The value from which one follows by operations that `skips` accepts, each of its first operand."""
        while (producer := self.producers.get(value)) is not None and skips(producer):
            value = producer.operands[0]
        return value

    def substitute(self, replaced: Mapping[Value, Value], operations: tuple[Operation, ...]) -> Graph:
        """A copy with other operations, whose results and planned values are named anew.

        Args:
            replaced: the value that now stands for each that is gone.
            operations: in order of execution, with operands replaced.
        """
        specs: dict[Value, object] = {}
        for old, new in replaced.items() if self.specs else ():
            if old in self.specs:
                specs.setdefault(new, self.specs[old])
        return attrs.evolve(
            self,
            operations=operations,
            outputs=tuple(replaced.get(value, value) for value in self.outputs),
            specs={**specs, **self.specs},
            planned={value: replaced.get(local, local) for value, local in self.planned.items()},
        )

    @property
    def names(self) -> Iterator[str]:
        """The names of all values."""
        yield from (value.name for value in (*self.inputs, *(value for value, _ in self.constants)))
        for operation in self.operations:
            yield from (value.name for value in operation.tensors)
            yield operation.annotations.tuple_name

    def __str__(self) -> str:
        lines = [f"inputs {', '.join(map(repr, self.inputs))}"]
        lines += [f"constant {value!r}" for value, _ in self.constants]
        lines += [f"{operation!r}  # {operation.source}" for operation in self.operations]
        return "\n".join([*lines, f"outputs {', '.join(map(repr, self.outputs))}"])

    def verify(self) -> Graph:
        """Return the graph; TraceError unless every value is defined once, before its consumers and for them."""
        defined: set[Value] = set()
        regions = self.regions
        for value in (*self.inputs, *(value for value, _ in self.constants)):
            _define(value, defined)
        for operation in self.operations:
            for operand in operation.operands:
                if operand not in defined:
                    raise TraceError(f"{operand!r} is used before it is defined, in {operation!r}.")
                home = regions.home(operand) if regions else None
                if home is not None and home not in regions.path(operation) and operation.op not in (END, OTHERWISE):
                    raise TraceError(f"{operand!r} is used outside of its loop or branch, in {operation!r}.")
            for value in operation.tensors:
                _define(value, defined)
        for value in self.outputs:
            if value not in defined or regions.home(value) is not None:
                raise TraceError(f"Output {value!r} is not defined by the program.")
        return self


def producers_of(operations: Iterable[Operation]) -> dict[Value, Operation]:
    """The operation that each value is a result of."""
    return {value: operation for operation in operations for value in operation.tensors}


@lru_cache(maxsize=4096)
def _is_view(op: torch._ops.OpOverload) -> bool:
    return any(argument.alias_info is not None for argument in op._schema.arguments)


@lru_cache(maxsize=4096)
def _returns_tuple(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    return len(returns) != 1 or not isinstance(returns[0].type, torch._C.TensorType)


def _define(value: Value, defined: set[Value]) -> None:
    if value in defined:
        raise TraceError(f"{value!r} is defined twice.")
    defined.add(value)


def _text(argument: Any) -> str:
    return str(map_leaves(lambda leaf: f"%{leaf.name}" if isinstance(leaf, Value) else leaf, argument))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf of nested tuples, lists and dicts, the only containers in arguments."""
    if isinstance(tree, (tuple, list)):
        return type(tree)([map_leaves(function, item) for item in tree])
    if isinstance(tree, dict):
        return {key: map_leaves(function, item) for key, item in tree.items()}
    return function(tree)


def iterate_leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    found: list[Any] = []
    _collect_leaves((tree,), found)
    return iter(found)


def _collect_leaves(items: Iterable[Any], found: list[Any]) -> None:
    for item in items:  # not by generators, of which each level would pass on every leaf
        if isinstance(item, (tuple, list)):
            _collect_leaves(item, found)
        elif isinstance(item, dict):
            _collect_leaves(item.values(), found)
        else:
            found.append(item)


def numbers_of(graph: Graph) -> Iterator[Number]:
    """The dynamic numbers among the arguments of a program's operations."""
    for operation in graph.operations:
        for leaf in iterate_leaves((operation.args, dict(operation.kwargs))):
            if isinstance(leaf, Number):
                yield leaf


def freeze(tree: Any) -> Any:
    """A hashable key for operator arguments: equal for equal arguments, where 1, 1.0 and True count as different."""
    if isinstance(tree, (tuple, list)):
        return tuple([freeze(item) for item in tree])
    if isinstance(tree, dict):
        return tuple([(key, freeze(tree[key])) for key in sorted(tree)])
    return tree if isinstance(tree, (Value, TensorMeta, Number, OperandNumber)) else (type(tree), repr(tree))
