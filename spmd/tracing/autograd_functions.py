"""`torch.autograd.Function`s whose `forward` takes a context, under torch.func inside a trace.

torch.func refuses them, as it has to know what `forward` saves. In a trace a function is generated: its `forward` runs
theirs with a stand-in for the context, which `backward` gets. Under several transforms `forward` also returns what was
saved, as each transform has tensors of its own.
Functions that torch generates for `torch.library.register_autograd` act on one transform, as an autograd kernel does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch._C._functorch import (
    TransformType,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from spmd.errors import TraceError
from spmd.tracing.running import is_tracing, running_trace
from spmd.tracing.source import user_source, where

_Function: Any = torch.autograd.Function
_apply = _Function.apply.__func__


@functools.wraps(_apply)
def _apply_in_trace(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """In a trace under torch.func a function that supports it; else torch's own `apply`."""
    if is_tracing() and not cls.__module__.startswith(("spmd.", _OF_OPERATORS)):
        running_trace().functions.append(f"autograd.Function {cls.__name__}")
    if not is_tracing() or not torch._C._are_functorch_transforms_active():
        return _apply(cls, *args, **kwargs)
    if cls.setup_context is not _Function.setup_context or kwargs:
        return _apply(_refusing_twice(cls) if _is_once_differentiable(cls.backward) else cls, *args, **kwargs)
    if cls.__module__ == _OF_OPERATORS:
        with enable_single_level_autograd_function():
            return super(_Function, _with_modes(cls)).apply(*args)
    context = _Context(tuple(map(needs_grad, args)))
    results = _apply(_generated(cls, context), *args)[: context._spmd.count]
    return results if context._spmd.is_tuple else results[0]


# Once, and not in each trace: other threads may apply functions meanwhile.
_Function.apply = classmethod(_apply_in_trace)
_OF_OPERATORS = "torch._library.autograd"


def _with_modes(cls: Any) -> Any:
    """A function whose `forward` has the modes of its call: other transforms act in it."""
    grad, forward_grad = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()

    def forward(ctx: Any, *args: Any) -> Any:
        with torch.set_grad_enabled(grad), torch.autograd.forward_ad._set_fwd_grad_enabled(forward_grad):
            return cls.forward(ctx, *args)

    return type(cls.__name__, (cls,), {"forward": staticmethod(forward)})


@attrs.define
class _Notes:
    """The notes of `forward` about its results.

    Attributes:
        saved: the tensors for the backward pass.
        dirty: the arguments that were written to.
        constant: the results without derivatives.
        materializes: whether `backward` gets zeros in place of None.
        count: the number of results.
        is_tuple: whether they are a tuple.
    """

    saved: tuple[Any, ...] = ()
    dirty: tuple[Any, ...] = ()
    constant: tuple[Any, ...] = ()
    materializes: bool = True
    count: int = 0
    is_tuple: bool = False


class _Context:
    """The context that `forward` gets, and `backward` under one transform.

    Args:
        needs_input_grad: for each argument whether some transform differentiates it.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self._spmd, self.needs_input_grad = _Notes(), needs_input_grad

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self._spmd.saved

    def save_for_backward(self, *tensors: Any) -> None:
        self._spmd.saved = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Nothing: there is no forward mode."""

    def mark_dirty(self, *tensors: Any) -> None:
        self._spmd.dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self._spmd.constant = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._spmd.materializes = value


@attrs.frozen
class _TensorNumber:
    """Stands for a tensor of a call: an argument or a result, by its number."""

    is_argument: bool
    number: int


def _generated(cls: Any, context: _Context) -> Any:
    """A function like `cls` for one call, with `setup_context`.

    Under `torch.func.grad` alone `backward` runs as on one device: without grad mode, with the tensors that `forward`
    saved. Further transforms may differentiate it, so there what is saved is an argument or a result.
    """
    notes, saves = context._spmd, not _is_under_one_grad()
    held: dict[str, Any] = {}
    outputs: list[Any] = []

    def forward(*args: Any) -> tuple[Any, ...]:
        results = cls.forward(context, *args)
        notes.is_tuple = isinstance(results, tuple)
        outputs[:] = results if notes.is_tuple else (results,)
        notes.count = len(outputs)
        places = {id(x): _TensorNumber(False, n) for n, x in enumerate(outputs) if isinstance(x, torch.Tensor)}
        places |= {id(x): _TensorNumber(True, n) for n, x in enumerate(args) if isinstance(x, torch.Tensor)}

        def place(leaf: torch.Tensor) -> _TensorNumber:
            if id(leaf) not in places:
                places[id(leaf)] = _TensorNumber(False, len(outputs))
                outputs.append(leaf)
            return places[id(leaf)]

        attributes = {name: value for name, value in vars(context).items() if name not in ("_spmd", "needs_input_grad")}
        kept = {"attributes": attributes, "saved": notes.saved} if saves else {}
        held.update(tree_map_only(torch.Tensor, place, {**kept, "dirty": notes.dirty, "constant": notes.constant}))
        return tuple(outputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        take = lambda place: (inputs if place.is_argument else output)[place.number]  # noqa: E731
        found = tree_map_only(_TensorNumber, take, held)
        for name, value in found.get("attributes", {}).items():
            setattr(ctx, name, value)
        ctx.save_for_backward(*found.get("saved", _tensors(x for x in inputs if not any(x is y for y in output))))
        ctx.mark_dirty(*found["dirty"])
        ctx.mark_non_differentiable(*found["constant"])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *cotangents: Any) -> Any:
        if any(cotangent is not None for cotangent in cotangents[notes.count :]):
            raise _refusal(cls, "is differentiated twice, and saves what is neither an argument nor a result")
        given = cotangents[: notes.count]
        if notes.materializes:
            given = tuple(_zeros(x) if g is None else g for g, x in zip(given, outputs, strict=False))
        if saves:
            results = cls.backward(ctx, *given)
        else:
            context.needs_input_grad = ctx.needs_input_grad
            results = _below_one_grad(functools.partial(cls.backward, context), given)
        is_final = not saves or _is_once_differentiable(cls.backward)
        return _final(cls, results, (*cotangents, *ctx.saved_tensors)) if is_final else results

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _refusal(cls, "is differentiated in forward mode")

    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise _refusal(cls, "is batched by vmap")

    methods = (forward, setup_context, backward, jvp, vmap)
    return type(cls.__name__, (_Function,), {method.__name__: staticmethod(method) for method in methods})


def _is_under_one_grad() -> bool:
    return [interpreter.key() for interpreter in get_interpreter_stack() or ()] == [TransformType.Grad]


def _below_one_grad(function: Callable[..., Any], cotangents: Sequence[Any]) -> Any:
    """Call a function outside of the transform that runs, if it is one of `torch.func.grad`."""
    if not _is_under_one_grad():
        return function(*cotangents)
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    with interpreter.lower(), torch.no_grad():
        results = function(*tree_map_only(torch.Tensor, lambda x: _unwrap_for_grad(x, level), tuple(cotangents)))
    return tree_map_only(torch.Tensor, lambda x: _wrap_for_grad(x, level), results)


def _is_once_differentiable(backward: Any) -> bool:
    while backward is not None and getattr(backward, "__code__", None) is not _ONCE:
        backward = getattr(backward, "__wrapped__", None)
    return backward is not None


_ONCE = once_differentiable(lambda ctx: None).__code__


def _refusing_twice(cls: Any) -> Any:
    """A function under `once_differentiable` that refuses second derivatives; torch.func makes them zeros."""

    def backward(ctx: Any, *cotangents: Any) -> Any:
        return _final(cls, cls.backward(ctx, *cotangents), (*cotangents, *ctx.saved_tensors))

    return type(cls.__name__, (cls,), {"backward": staticmethod(backward)})


def _final(cls: Any, gradients: Any, sources: Sequence[Any]) -> Any:
    """Gradients that refuse to be differentiated, if they depend on what is."""
    found = [x for x in sources if needs_grad(x)]
    refuse = lambda x: _Final.apply(cls.__name__, x, *found) if found else x  # noqa: E731
    return tree_map_only(torch.Tensor, refuse, gradients)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


class _Final(_Function):  # type: ignore[misc]
    """A gradient, which depends on other tensors in a way that has no derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, x: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        raise TraceError(
            f"torch.autograd.Function {ctx.name} is differentiated twice at {where(user_source())}. Write a backward "
            "of operators, without once_differentiable, and setup_context(ctx, inputs, output) beside forward(*args)."
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Final.backward(ctx, None)


def _zeros(x: Any) -> Any:
    return torch.zeros_like(x) if isinstance(x, torch.Tensor) else None


def needs_grad(x: Any) -> bool:
    """Test for a tensor that some transform differentiates."""
    while isinstance(x, torch.Tensor):
        if x.requires_grad:
            return True
        if not is_functorch_wrapped_tensor(x):
            return False
        x = get_unwrapped(x)
    return False


def _refusal(cls: Any, done: str) -> TraceError:
    return TraceError(
        f"torch.autograd.Function {cls.__name__}, called at {where(user_source())}, {done}, and its forward takes a "
        "context. Write forward(*args) and setup_context(ctx, inputs, output), as torch.func requires."
    )
