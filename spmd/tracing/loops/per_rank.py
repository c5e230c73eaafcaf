"""Loops and branches in shard_map bodies: their operands get the types along manual axes that their bodies expect.

What a loop carries has one type in all trips, and a result of a branch one on both sides, so invariant values are cast
before the loop, or at the end of a side. Where ranks may part, because a predicate varies between them, all tensors
from outside are varying inside: their gradients are summed where all ranks are together again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from spmd.collectives.axis_types import AxisType
from spmd.collectives.environment import bound_axes, captured_environment
from spmd.core.spec import P, TensorMeta
from spmd.core.spec_text import encode_spec
from spmd.errors import TraceError
from spmd.ir.effects import Effect
from spmd.ir.graph import Graph, Operation, Value
from spmd.tracing.manual.axis_types import AxisTypes, Types, remedy
from spmd.tracing.manual.casts import Casts
from spmd.tracing.running import function_modes, running_trace
from spmd.tracing.source import user_source, where

_I, _V, _U, _R = AxisType.INVARIANT, AxisType.VARYING, AxisType.UNREDUCED, AxisType.REDUCED
_HIGHER = {(_I, _V), (_R, _V), (_I, _R)}
"""The types from which and to which a value can be cast, whatever is computed from it."""


def known_types() -> AxisTypes | None:
    """The types of the values of the trace that is running; None if nothing in it is per rank."""
    observer = running_trace().recorder.observer
    return observer if isinstance(observer, AxisTypes) else None


def types_of(x: torch.Tensor, axes: Iterable[str] | None = None) -> Types:
    """The types of a tensor of the trace along axes, by default those bound, and others that are manual for it."""
    types, trace = known_types(), running_trace()
    held = types.of(trace.value(trace.take(x))) if types is not None else {}
    return {**dict.fromkeys(bound_axes() if axes is None else axes, _I), **held}


def declare(values: Sequence[Value], each: Sequence[Types]) -> None:
    """Give values, the inputs of a body, their types, if values of the trace have any."""
    types = known_types()
    for value, held in zip(values, each, strict=True):
        if types is not None and held:
            types.declare(value, held)


def declare_constants(made: Mapping[Value, Value]) -> None:
    """Give constants the types of those they are copies of: zeros in a derivative have those of a cotangent."""
    types = known_types()
    for value, new in made.items():
        if types is not None and types.is_constant(value) and (held := types.of(value)):
            types.declare(new, held)


def region_of_body() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Makes the contexts in which the function of a body runs in another trace: with the axes and casts of here."""
    here, environment = _casts(), captured_environment()
    if not here:
        return contextlib.nullcontext

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with environment(), contextlib.ExitStack() as stack:
            active = _casts()
            for mode in here:
                if mode not in active:
                    stack.enter_context(mode)
            yield

    return context


def _casts() -> list[Casts]:
    """The casts that act on functions."""
    return [mode for mode in function_modes() if isinstance(mode, Casts)]


def raised(x: torch.Tensor, wanted: Types) -> torch.Tensor:
    """A tensor cast along the axes where its type can be cast to the one that is wanted."""
    held = types_of(x)
    for axis, to in wanted.items():
        if (held.get(axis, _I), to) in _HIGHER:
            x = torch.ops.spmd.pcast(x, held.get(axis, _I).value, to.value, [axis])
    return x


def joined(first: Types, second: Types) -> Types:
    """The types to which values of two types can be cast.

    Raises:
        TraceError: along an axis there is none.
    """
    found = dict(first)
    for axis, other in second.items():
        one = first.get(axis, _I)
        if (one, other) in _HIGHER:
            found[axis] = other
        elif one is not other and (other, one) not in _HIGHER:
            raise TraceError(
                f"A value of a loop or a branch at {where(user_source())} is {one} along {axis!r} before a trip, or on "
                f"one side, and {other} after it, or on the other side. {remedy(_U, _I, axis)}"
            )
    return found


def varying(types: Types, axes: Sequence[str]) -> Types:
    """Types of which those along some axes are varying, unless they are unreduced."""
    return {axis: _V if axis in axes and held is not _U else held for axis, held in types.items()}


def as_expected(x: torch.Tensor, value: Value | None) -> torch.Tensor:
    """An operand of a loop or a branch, per rank and with the types that its body expects.

    Args:
        x: a tensor of the trace.
        value: the input of the body; None for a predicate.

    Raises:
        TraceError: its types cannot be cast to those.
    """
    types, trace = known_types(), running_trace()
    if types is None or value is None or not (wanted := types.of(value)):
        return x
    manual = types.manual_axes(trace.value(x))
    if new := [axis for axis in wanted if axis not in manual]:
        sizes = [types.axes_of_regions[axis] for axis in new]
        x = torch.ops.spmd.enter(x, encode_spec(P()), [], new, sizes, list(x.shape))
    held = types_of(x)
    x = raised(x, wanted)
    for axis, to in wanted.items():
        kind = held.get(axis, _I)
        if kind is to or (kind, to) in _HIGHER:
            continue
        if to is _U and types.is_constant(trace.value(x)):
            x = torch.ops.spmd.to_partial(raised(x, {axis: _V}), "sum", [axis])
            continue
        raise TraceError(
            f"A value {TensorMeta.of(x)} that a loop or a branch takes at {where(user_source())} is {kind} along "
            f"{axis!r}, and its body expects one that is {to}. {remedy(kind, to, axis)}"
        )
    return x


def cast_once(x: torch.Tensor, wanted: Types) -> torch.Tensor:
    """A tensor cast to types as functions of the region cast their arguments: its gradient is summed once for all."""
    casts = _casts()
    return casts[-1].expected(x, wanted) if casts and wanted else x


def cast_to(value: Value, graph: Graph) -> Types:
    """The types to which a program casts an input, if it does nothing else with it."""
    consumers = graph.consumers.get(value, ())
    if len(consumers) != 1 or consumers[0].op is not torch.ops.spmd.pcast.default or value in graph.outputs:
        return {}
    _, held, to, axes = consumers[0].args
    return dict.fromkeys(axes, AxisType(to)) if (AxisType(held), AxisType(to)) in _HIGHER else {}


def again(value: Value, meta: TensorMeta | None = None, *, cotangent: bool = False) -> Value:
    """A new value of the types of another one, or of its cotangent; with another meta, if one is given."""
    made, types = Value(value.name, meta or value.meta), known_types()
    if types is not None:
        held = types.of(value)
        declare([made], [{axis: kind.of_cotangent for axis, kind in held.items()} if cotangent else held])
    return made


def result_types(outputs: Sequence[Value]) -> list[Types]:
    """The types of the outputs of a body."""
    types = known_types()
    around = dict.fromkeys(bound_axes(), _I)
    return [{**around, **(types.of(value) if types is not None else {})} for value in outputs]


def parted_axes(call: str, predicate: Types) -> tuple[str, ...]:
    """The axes along which ranks part, because a predicate differs between them.

    Raises:
        TraceError: the predicate is unreduced.
    """
    for axis, held in predicate.items():
        if held is _U:
            raise TraceError(
                f"The predicate of {call} at {where(user_source())} is unreduced along {axis!r}: each rank holds one "
                f"summand of it. {remedy(_U, _I, axis)}"
            )
    return tuple(axis for axis, held in predicate.items() if held is _V)


def axes_of_casts(graphs: Sequence[Graph]) -> set[str]:
    """The axes along which programs cast what is invariant: derivatives sum over ranks there, which may have parted."""
    return {
        axis
        for graph in graphs
        for operation in graph.operations
        if operation.op is torch.ops.spmd.pcast.default and operation.args[1:3] == (_I.value, _V.value)
        for axis in operation.args[3]
    }


def check_parted(call: str, parted: Sequence[str], operations: Sequence[Operation]) -> None:
    """Check that ranks do not meet where some of them may be missing.

    Raises:
        TraceError: an operation is a collective, or has another effect that all ranks must have alike.
    """
    for operation in operations if parted else ():
        if operation.effect not in (None, Effect.REGION):
            raise TraceError(
                f"The predicate of {call} at {where(user_source())} varies along {parted[0]!r}, so only some ranks may "
                f"run its body, and {operation.name} at {where(operation.source)} is run by all ranks or none. Make "
                f"the predicate one for all, as spmd.collectives.pmax(predicate.int(), {parted[0]!r}) > 0 (or psum), "
                "or move the operation out of the body."
            )
