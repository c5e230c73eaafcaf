"""Casts of the operands of torch functions in a shard_map body to one type, before torch differentiates the function.

A function of invariant and varying tensors is one of varying tensors: the cast of an invariant operand is recorded like
any operator, so its transpose sums the gradient over the ranks, as in JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._functorch import get_interpreter_stack
from torch._functorch.autograd_function import custom_function_call
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from spmd.collectives.axis_types import AxisType
from spmd.collectives.environment import backward_of, captured_environment
from spmd.collectives.functional import cast_along
from spmd.errors import TraceError
from spmd.ir.graph import Value, iterate_leaves, map_leaves
from spmd.tracing.manual.axis_types import AxisTypes, Types, remedy
from spmd.tracing.manual.batches import check_batches
from spmd.tracing.running import running_trace
from spmd.tracing.source import where

_I, _V, _U, _R = AxisType.INVARIANT, AxisType.VARYING, AxisType.UNREDUCED, AxisType.REDUCED


class Casts(TorchFunctionMode):
    """Brings the operands of every torch function to one type along each manual axis.

    Args:
        types: the types of the values of the trace.
        axes: the manual axes of the body, those of bodies around it too. An inner body has casts of its own.
        enter: makes the per-rank value of a tensor from outside of the body.
    """

    def __init__(self, types: AxisTypes, axes: Sequence[str], enter: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._types, self._axes, self._enter = types, tuple(axes), enter
        # Keyed by ids: each entry keeps its tensor alive, so that Python does not reuse the id.
        self._known: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._functions: dict[Any, Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__", "requires_grad_"):
            return func(*args, **kwargs)
        if any(map(_is_below, iterate_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            outputs, inputs = args
            cotangents = self._cotangents(outputs, kwargs["grad_outputs"])
            gradients = func(outputs, inputs, **{**kwargs, "grad_outputs": cotangents})
            check_batches(_listed(outputs), _listed(inputs), gradients, self._axes, self._types_of)
            return gradients
        if func is custom_function_call and getattr(args[0], "casts_operands", False):
            return func(*args, **kwargs)  # a loop or a branch, whose operands have the types that its body expects
        if func is custom_function_call:
            args = (self._function(args[0]), *args[1:])
        if name.startswith("_foreach_"):
            func, args = _on_lists(func, args)
            args = self._elementwise(args, name)
        else:
            args, kwargs = self._aligned(args, kwargs, name)
        return func(*args, **kwargs)

    def _function(self, function: Any) -> Any:
        """A torch.autograd.Function that runs with these casts; one class for each, as torch compares them."""
        if function not in self._functions:
            self._functions[function] = _with_casts(function, self)
        return self._functions[function]

    def is_constant(self, leaf: torch.Tensor) -> bool:
        """Whether a tensor depends on no data."""
        trace = running_trace()
        return self._types.is_constant(trace.value(trace.lift(leaf)))

    def _aligned(self, args: Any, kwargs: Any, name: str) -> Any:
        """The arguments of a function, entered and cast."""
        target = _written(name, args, kwargs)
        if target is not None:
            self._check_target(target, (args, kwargs), name)
        enter = lambda leaf: self._entered(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        args, kwargs = map_leaves(enter, args), map_leaves(enter, kwargs)
        leaves = [leaf for leaf in iterate_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        wanted = self._wanted(leaves)
        if not wanted:
            return args, kwargs
        cast = lambda leaf: self._cast(leaf, wanted) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        return map_leaves(cast, args), map_leaves(cast, kwargs)

    def _elementwise(self, args: tuple[Any, ...], name: str) -> tuple[Any, ...]:
        """The arguments of a function of lists, which it computes element by element."""
        lists = [position for position, arg in enumerate(args) if isinstance(arg, (list, tuple)) and arg]
        rows = [self._aligned(row, {}, name)[0] for row in zip(*(args[position] for position in lists), strict=False)]
        found = list(args)
        for number, position in enumerate(lists):
            found[position] = [row[number] for row in rows]
        return tuple(found)

    def _wanted(self, leaves: Sequence[torch.Tensor]) -> dict[str, AxisType]:
        """The axes along which tensors differ in type, and the type that all can be cast to.

        Beside an unreduced value an invariant one is cast to reduced: its gradient is in summands.
        """
        if len(leaves) < 2:
            return {}
        held = [self._types.of(value) for value in map(running_trace().value, leaves)]
        found: dict[str, AxisType] = {}
        for axis in self._axes:
            kinds = {types.get(axis, _I) for types in held}
            if len(kinds) > 1 and not {_U, _V} <= kinds:
                found[axis] = _V if _V in kinds else _R
        return found

    def expected(self, leaf: torch.Tensor, wanted: Mapping[str, AxisType]) -> torch.Tensor:
        """A tensor entered and cast to types along axes, where it can be: once for all that expect it so."""
        return self._cast(self._entered(leaf), wanted)

    def _cast(self, leaf: torch.Tensor, wanted: Mapping[str, AxisType]) -> torch.Tensor:
        held = self._types.of(running_trace().value(leaf))
        casts = tuple((axis, to) for axis, to in wanted.items() if held.get(axis, _I) not in (to, _U))
        if not casts:
            return leaf
        cast = running_trace().cast
        return self._once(
            leaf, casts, lambda: found if (found := cast(leaf, casts)) is not None else _cast_each(leaf, casts)
        )

    def _entered(self, leaf: torch.Tensor) -> torch.Tensor:
        """The per-rank value of a tensor: its own, or that of a tensor from outside, which all ranks hold."""
        trace = running_trace()
        held: torch.Tensor = trace.take(leaf)
        value = trace.value(held)
        if self._types.of(value).keys() >= set(self._axes) or (not held.is_cpu and held.is_meta):
            return held
        return self._once(held, "enter", lambda: self._enter(held))

    def _once(self, leaf: torch.Tensor, change: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` makes of a tensor; the same as before for the same tensor with the same value.

        A second cast would be a second sum of gradients. Results are kept for one level of transforms, which wrap them.
        """
        value: Value = running_trace().value(running_trace().lift(leaf))
        key = id(leaf), value, change, len(get_interpreter_stack() or ())
        if key not in self._known:
            self._known[key] = (leaf, make())
        return self._known[key][1]

    def _check_target(self, target: torch.Tensor, operands: Any, name: str) -> None:
        """TraceError for a write in place to a tensor that is not of the type of what is written."""
        trace = running_trace()
        value = trace.value(trace.lift(target))
        held = self._types.of(value)
        if not held.keys() >= set(self._axes):
            raise TraceError(
                f"{name} at {where()} writes in place to a tensor from outside of the shard_map body. Pass it as an "
                "argument, and return the new one."
            )
        for leaf in iterate_leaves(operands):
            if leaf is target or not isinstance(leaf, torch.Tensor):
                continue
            other = self._types.of(trace.value(trace.lift(leaf)))
            for axis in self._axes:
                given, kind = other.get(axis, _I), held[axis]
                if given is not kind and given is not _I and not (given is _R and kind is _V):
                    raise TraceError(
                        f"{name} at {where()} writes a value that is {given} along {axis!r} in place to one "
                        f"{value.meta} that is {kind}. {remedy(kind, given, axis)} Do so before the write: it makes a "
                        "new tensor, to which you can write."
                    )

    def _cotangents(self, outputs: Any, given: Any) -> list[torch.Tensor | None]:
        """The cotangents given to torch.autograd.grad, of the types that the outputs require."""
        listed = _listed(outputs)
        cotangents = [given] if isinstance(given, torch.Tensor) else list(given or [None] * len(listed))
        return [self._cotangent(output, cotangent) for output, cotangent in zip(listed, cotangents, strict=True)]

    def _cotangent(self, output: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor | None:
        """The cotangent of an output, cast to the type that it requires."""
        trace = running_trace()
        types = self._types.of(trace.value(output))
        if given is None:
            for axis, held in types.items():
                if held is _R:
                    raise TraceError(
                        f"The gradient of a value that is reduced along {axis!r}, at {where()}, would need its "
                        f"cotangent in summands. Cast it first: spmd.collectives.pcast(x, {axis!r}, to='varying')."
                    )
            return None
        return self._as_cotangent(given, types, f"A cotangent at {where()}")

    def _as_cotangent(self, given: torch.Tensor, types: Types, what: str) -> torch.Tensor:
        """A cotangent cast to the type that values of some types require."""
        given = self._entered(given)
        for axis, held in types.items():
            wanted = held.of_cotangent
            found = self._types.of(running_trace().value(given)).get(axis, _I)
            if found is wanted:
                continue
            if (found, wanted) in ((_I, _V), (_R, _V), (_I, _R)):
                given = cast_along(given, axis, wanted)
                continue
            raise TraceError(
                f"{what} is {found} along {axis!r}, and that of a value that is {held} must be {wanted}. "
                f"{remedy(found, wanted, axis)}"
            )
        return given

    def _gradients(self, function: str, inputs: Sequence[Types | None], results: Any) -> Any:
        """What the backward pass of an autograd.Function returned, cast to the types that its inputs require."""
        found = list(results) if isinstance(results, tuple) else [results]
        for number, (types, given) in enumerate(zip(inputs, found, strict=False)):
            if types is not None and isinstance(given, torch.Tensor) and not self.is_constant(given):
                found[number] = self._as_cotangent(given, types, f"Gradient {number} that {function}.backward returns")
        return tuple(found)

    def _types_of(self, x: torch.Tensor) -> Types:
        """The types of a tensor; along axes that are left out it is invariant."""
        trace = running_trace()
        return self._types.of(trace.value(trace.lift(x)))

    def _types_of_inputs(self, inputs: Sequence[Any]) -> list[Types | None]:
        return [self._types_of(x) if isinstance(x, torch.Tensor) else None for x in inputs]


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _on_lists(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A function of a list and a 0-d tensor as one of two lists: each element has a type of its own."""
    if len(args) != 2 or not isinstance(args[1], torch.Tensor) or args[1].ndim:
        return func, args
    packet = getattr(func, "overloadpacket", func)
    return getattr(torch, packet.__name__), (args[0], [args[1]] * len(args[0]))


def _is_below(leaf: Any) -> bool:
    """Whether a value is a tensor below differentiation, where functionalization and the recorder call operators."""
    return isinstance(leaf, FakeTensor) or (type(leaf) is torch.Tensor and torch._is_functional_tensor(leaf))


def _cast_each(leaf: torch.Tensor, casts: Sequence[tuple[str, AxisType]]) -> torch.Tensor:
    for axis, to in casts:
        leaf = cast_along(leaf, axis, to)
    return leaf


def _written(name: str, args: Sequence[Any], kwargs: Any) -> torch.Tensor | None:
    """The tensor that a torch function writes to; None if it writes to none, by what functions are called."""
    out = kwargs.get("out")
    if isinstance(out, torch.Tensor):
        return out
    dunder = name.startswith("__")
    writes = name in _WRITING_DUNDERS if dunder else name.endswith("_")
    return args[0] if writes and args and isinstance(args[0], torch.Tensor) else None


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_WRITING_DUNDERS = frozenset(("__setitem__", *(f"__i{name}__" for name in _OPERATORS)))


def _with_casts(function: Any, casts: Casts) -> Any:
    """A torch.autograd.Function whose methods, called by a transform, run as the body does: with its axes and casts.

    The transform may be outside of the body, and call `backward` when the body has ended.
    """
    environment = captured_environment()

    def inside(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any) -> Any:
            with environment(), casts:
                return method(*args)

        return call

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.spmd_types = casts._types_of_inputs(inputs)
        inside(function.setup_context)(ctx, inputs, output)

    def backward(ctx: Any, *cotangents: Any) -> Any:
        with backward_of(function.__name__, casts.is_constant):
            results = inside(function.backward)(ctx, *cotangents)
        with environment(), casts:
            return casts._gradients(function.__name__, ctx.spmd_types, results)

    base = torch.autograd.Function
    methods = {name: inside(getattr(function, name)) for name in ("forward", "jvp", "vmap")}
    methods |= {"setup_context": setup_context, "backward": backward}
    own = {name: method for name, method in methods.items() if getattr(function, name) is not getattr(base, name)}
    return type(function.__name__, (function,), {name: staticmethod(method) for name, method in own.items()})
