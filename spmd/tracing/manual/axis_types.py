"""The types of per-rank values along the manual mesh axes, operator by operator, while a function is traced.

The recorder sees the operators of backward passes too, so types are known there as well. Operands of one operator have
one type, to which `casts` has brought them before differentiation; where they still differ, a gradient would miss its
sum over ranks, so that is an error. A value that depends on no data, such as a constant in the formula of a derivative,
has no gradient, and can be an operand beside any type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from spmd.collectives.axis_types import AxisType
from spmd.collectives.environment import bound_axes
from spmd.collectives.manual import ENTER, LEAVE, ManualAxes, region_axes
from spmd.collectives.primitives import BY_OPERATOR
from spmd.core.placement import Partial, Placement, Replicate
from spmd.core.spec import P
from spmd.core.spec_text import parse_spec
from spmd.core.value_types import is_continuous
from spmd.errors import TraceError
from spmd.ir.effects import Effect
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.operator_kinds import COPIES, LIKE, RESHAPERS, fill_number
from spmd.ir.regions import BOUNDS, GIVE, MERGE, NEXT, STRUCTURE
from spmd.ir.source import Source
from spmd.rules import RULES, derive_strategies, find_rule
from spmd.tracing.canonicalize.canonicalize import canonicalize
from spmd.tracing.source import where

Types = Mapping[str, AxisType]
_I, _V, _U, _R = AxisType.INVARIANT, AxisType.VARYING, AxisType.UNREDUCED, AxisType.REDUCED
_OUTSIDE: Types = MappingProxyType({})


def types_of_spec(spec: P, axes: Iterable[str], reduced: Sequence[str] = ()) -> dict[str, AxisType]:
    """The types along manual axes of a value whose global value has a spec; it is reduced along the axes `reduced`.

    >>> types_of_spec(P("x", partial={"y": "sum"}), ("x", "y", "z"))
    {'x': AxisType.VARYING, 'y': AxisType.UNREDUCED, 'z': AxisType.INVARIANT}
    """
    known = {axis: _V for dim in spec.dims for axis in dim}
    known |= {axis: _U for axis, _ in spec.partial} | dict.fromkeys(reduced, _R)
    return {axis: known.get(axis, _I) for axis in axes}


class AxisTypes:
    """The type of every value of a trace along each of its manual axes; values outside of manual regions have none.

    Attributes:
        axes_of_regions: the manual axes of the regions that were traced, with their sizes.
    """

    def __init__(self) -> None:
        self.axes_of_regions: dict[str, int] = {}
        self._producers: dict[Value, Operation] = {}  # for messages
        self._manual = ManualAxes()
        self._types: dict[Value, Types] = {}
        self._constant: set[Value] = set()
        self._zero: set[Value] = set()

    def of(self, value: Value) -> Types:
        """The types of a value along its manual axes."""
        return self._types.get(value, _OUTSIDE)

    def is_constant(self, value: Value) -> bool:
        """Whether a value depends on no data."""
        return value in self._constant

    def declare_constant(self, value: Value) -> None:
        """Take note that a value depends on no data, as the key of a draw."""
        self._constant.add(value)

    def manual_axes(self, value: Value) -> frozenset[str]:
        """The axes along which a value is what one rank holds; a constant that a body makes has none."""
        return self._manual.of_value(value)

    def declare(self, value: Value, types: Types) -> None:
        """Give a value, an input of a body of a loop or a branch, its types: per rank along their axes."""
        self._types[value] = MappingProxyType(dict(types))
        self._manual.declare(value, types)

    def add(self, operation: Operation) -> None:
        """Derive the types of the results of an operation.

        Raises:
            TraceError: operands of different types, or an unreduced operand of an operator that is not linear in it.
        """
        self._producers.update(dict.fromkeys(operation.tensors, operation))
        self._manual.add(operation)
        if operation.effect is Effect.HOST:  # each rank prints what it holds, of any type
            return None
        if operation.op in STRUCTURE:
            return self._of_region(operation)
        if operation.op is ENTER:
            return self._enter(operation)
        if operation.op is LEAVE:
            return self._leave(operation)
        if not operation.operands or operation.op in LIKE or all(map(self.is_constant, operation.operands)):
            self._constant.update(operation.tensors)
        if self._is_zero(operation):
            self._zero.update(operation.tensors)
        own = tuple(operation.args[-1]) if operation.op.namespace == "spmd" and not operation.operands else ()
        axes = dict.fromkeys((*own, *(axis for value in operation.operands for axis in self.of(value))))
        if not operation.operands:
            axes |= dict.fromkeys(bound_axes())
        if not axes:
            return None
        if operation.op in BY_OPERATOR:
            return self._primitive(operation, axes)
        types = {axis: self._joined(operation, axis) for axis in axes if axis not in own}
        if _U in types.values():
            return self._linear(operation, types)
        return self._set(operation, types | dict.fromkeys(own, _V))

    def _of_region(self, operation: Operation) -> None:
        """What passes the border of a trip or of a branch keeps its types; a trip, and a case, have none."""
        if operation.op in BOUNDS:
            return
        operands = operation.operands
        if operation.op is GIVE and self.is_constant(operands[0]):  # zeros for what only the other side has
            self._constant.update(operation.tensors)
        varied = tuple(value for value in operands if not self.is_constant(value)) or operands
        given = {NEXT: operands[1:], MERGE: varied}.get(operation.op, operands[:1])
        found: dict[str, AxisType] = {}
        for value in given:
            found |= {axis: held for axis, held in self.of(value).items() if found.get(axis, _I) is _I}
        self._set(operation, found)

    def _is_number(self, value: Value) -> bool:
        """Whether a value in a body is that of a Python number, which torch wraps for `x[0] = 1.5`.

        All tensors from outside of a body enter it, so others have types.
        """
        return bool(bound_axes()) and value.meta.ndim == 0 and value not in self._types

    def check_result(self, value: Value) -> None:
        """TraceError for a per-rank value among the results of the whole function."""
        if self.of(value):
            raise self.leaked(value, None)

    def leaked(self, value: Value, source: Source | None) -> TraceError:
        """The error for a per-rank value that is used outside of its body."""
        axes = ", ".join(repr(axis) for axis in self.of(value) if axis not in bound_axes())
        return TraceError(
            f"A per-rank value {value.meta} of a shard_map body is used outside of it, at {where(source)}, where "
            f"{axes} is not manual. Return it from the body: out_specs say how it is sharded."
        )

    def _is_zero(self, operation: Operation) -> bool:
        """Whether an operation makes zeros, which are a sum of zeros too: derivatives write gradients to them."""
        copied = operation.op in COPIES or operation.op in RESHAPERS
        if copied and any(value in self._zero for value in operation.operands[:1]):
            return True
        number = fill_number(operation.op, operation.args)
        return isinstance(number, (bool, int, float)) and number == 0

    def _set(self, operation: Operation, types: Types) -> None:
        self._types.update(dict.fromkeys(operation.tensors, MappingProxyType(dict(types))))

    def _enter(self, operation: Operation) -> None:
        self._set(operation, {**self.of(operation.operands[0]), **_types_of_end(operation)})

    def _leave(self, operation: Operation) -> None:
        """Check that a value has the types of the spec with which it leaves: a cotangent may lack a sum."""
        (value,) = operation.operands
        for axis, expected in _types_of_end(operation).items():
            held = self.of(value).get(axis, _I)
            fits = held is expected or self.is_constant(value) or (held, expected) in ((_I, _V), (_I, _R))
            if not fits:
                raise TraceError(
                    f"A value {value.meta} of a shard_map body leaves it at {where(operation.source)} as {expected} "
                    f"along {axis!r}, and is {held} since {self.origin(value, axis)}. {remedy(held, expected, axis)}"
                )
        self._set(operation, {axis: t for axis, t in self.of(value).items() if axis not in region_axes(operation)})

    def _primitive(self, operation: Operation, axes: Mapping[str, None]) -> None:
        """A collective or a cast: it states its types along its axes; along others it is linear, or keeps the type."""
        value = operation.operands[0]
        possible = BY_OPERATOR[operation.op].types(*operation.args[1:])
        types = {axis: self._joined(operation, axis) for axis in axes}
        types |= {axis: self.of(value).get(axis, _I) for axis in operation.args[-1]}
        for axis in operation.args[-1]:
            held = types.get(axis, _I)
            if held not in possible and not self.is_constant(value) and is_continuous(value.meta.dtype):
                expected = " or ".join(possible)
                raise TraceError(
                    f"{operation.name} over {axis!r} at {where(operation.source)} takes a value that is {expected} "
                    f"along it (got {value.meta}, {held} since {self.origin(value, axis)})."
                )
            types[axis] = possible.get(held) or next(iter(possible.values()))
        self._set(operation, types)

    def _joined(self, operation: Operation, axis: str) -> AxisType:
        """The type of the results of an ordinary operator along an axis."""
        found: dict[AxisType, Value] = {}
        light: set[AxisType] = set()  # of operands that have no gradient
        for value in operation.operands:
            held = self.of(value).get(axis, _I)
            if self.is_constant(value) or not is_continuous(value.meta.dtype) or self._is_number(value):
                light.add(held)
            else:
                found.setdefault(held, value)
        if operation.op in LIKE:
            return _V if _V in found or _V in light else _I
        if _V in found and len(found) > 1:
            inside = axis in bound_axes() or all(axis in self.of(value) for value in found.values())
            raise self._mixed(operation, axis, found) if inside else self.leaked(found[_V], operation.source)
        for held in (_U, _V, _R):
            if held in found or held in light:
                return held
        return _I

    def _mixed(self, operation: Operation, axis: str, found: Mapping[AxisType, Value]) -> TraceError:
        values = "; ".join(
            f"{value.meta} is {held} along {axis!r}" + (f", since {self.origin(value, axis)}" if held is not _I else "")
            for held, value in found.items()
        )
        return TraceError(
            f"{operation.op} at {where(operation.source)} mixes types in a shard_map body, so a gradient would miss "
            f"its sum over ranks: {values}. Cast the operands to one type with spmd.collectives.pcast before this line."
        )

    def _linear(self, operation: Operation, types: dict[str, AxisType]) -> None:
        """An operation with unreduced operands: each operator of its canonical form must keep sums over ranks."""
        graph = Graph(tuple(dict.fromkeys(operation.operands)), (), (operation,), operation.tensors)
        inner = canonicalize(graph, lambda op: find_rule(op) is None)
        known = {value: dict(self.of(value)) for value in graph.inputs}
        for step in inner.operations:
            made = {axis: self._join_step(step, axis, known, types, operation) for axis in types}
            for number, value in enumerate(step.tensors):
                known[value] = {axis: held[number] for axis, held in made.items()}
        for value, result in zip(operation.tensors, inner.outputs, strict=True):
            self._types[value] = MappingProxyType(known[result])

    def _join_step(
        self,
        step: Operation,
        axis: str,
        known: Mapping[Value, Types],
        types: Types,
        whole: Operation,
    ) -> list[AxisType]:
        held = [known[value].get(axis, _I) for value in step.operands]
        if _U not in held:
            joined = next((kind for kind in (_V, _R) if kind in held), _I)
            return [joined] * len(step.tensors)
        plain: list[Placement] = [Partial("sum") if kind is _U else Replicate() for kind in held]
        zeros = [Partial("sum") if value in self._zero else p for p, value in zip(plain, step.operands, strict=True)]
        results = _through_rule(step, plain) or _through_rule(step, zeros)
        if results is None or _V in held:
            value = whole.operands[[self.of(v).get(axis) for v in whole.operands].index(_U)]
            raise TraceError(
                f"{whole.op} at {where(whole.source)} is not linear in {value.meta}, which is unreduced along {axis!r} "
                f"since {self.origin(value, axis)}: each rank holds one summand of it. Call psum over {axis!r} first."
            )
        return [_U if isinstance(state, Partial) else _I for state in results]

    def origin(self, value: Value, axis: str) -> str:
        """The operation and line at which a value got its type along an axis, for messages."""
        held = self.of(value).get(axis, _I)
        while True:
            made = self._producers.get(value)
            if made is None:
                return "it was closed over"
            before = next((v for v in made.operands if self.of(v).get(axis, _I) is held), None)
            if made.op in (ENTER, LEAVE) or before is None:
                return _named(made)
            value = before


def _types_of_end(operation: Operation) -> dict[str, AxisType]:
    """The types of the per-rank value that enters or leaves a region, along the axes of the region."""
    return types_of_spec(parse_spec(operation.args[1]), region_axes(operation), operation.args[2])


def _through_rule(operation: Operation, wanted: list[Placement]) -> tuple[Placement, ...] | None:
    """The placements of the results for these placements of operands, by the operator's rule; None if it has none."""
    rule = find_rule(operation.op, RULES)
    if rule is None:
        return None
    for strategy in derive_strategies(rule.factorize(operation.call())):
        if strategy.body is None and list(strategy.operands) == wanted:
            return strategy.results
    return None


def _named(operation: Operation) -> str:
    """An operation and its line, for messages."""
    source: Source | None = operation.source
    if operation.op is ENTER:
        return f"it entered the body at {where(source)}"
    return f"{operation.name} at {where(source)}"


def remedy(held: AxisType, expected: AxisType, axis: str) -> str:
    """What to call so that a value of one type gets another one, as a sentence."""
    if expected is _I:
        made = {
            _V: f"spmd.collectives.psum(x, {axis!r}) (or pmean, pmax, all_gather(x, {axis!r}, to='invariant'))",
            _U: f"spmd.collectives.psum(x, {axis!r})",
            _R: f"spmd.collectives.pcast(x, {axis!r}, to='varying') and then a collective",
        }[held]
        return f"Call {made}."
    if held is _I and expected is _U:
        return f"Leave {axis!r} out of 'partial': all ranks hold the whole value, and no summands of it."
    if held in (_I, _V):
        return f"Call spmd.collectives.pcast(x, {axis!r}, to={expected.value!r})."
    return f"Call spmd.collectives.psum(x, {axis!r}) first."
