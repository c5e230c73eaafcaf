"""`torch.autograd.Function`s whose `forward` takes a context, under torch.func inside a trace.

torch.func refuses them, as it has to know what `forward` saves. In a trace a function is generated: its `forward` runs
theirs with a stand-in for the context and also returns what that saved, and its `setup_context` saves these.
Functions that torch generates for `torch.library.register_autograd` act on one transform, as an autograd kernel does.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map, tree_map_only

from spmd.errors import TraceError
from spmd.tracing.recorder import where
from spmd.tracing.running import is_tracing
from spmd.tracing.source import user_source

_Function: Any = torch.autograd.Function
_apply = _Function.apply.__func__


@functools.wraps(_apply)
def _apply_in_trace(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """In a trace under torch.func a function that supports it; else torch's own `apply`."""
    if not is_tracing() or not torch._C._are_functorch_transforms_active():
        return _apply(cls, *args, **kwargs)
    if cls.setup_context is not _Function.setup_context or kwargs:
        return _apply(_refusing_twice(cls) if _is_once_differentiable(cls.backward) else cls, *args, **kwargs)
    if cls.__module__ == _OF_OPERATORS:
        with enable_single_level_autograd_function():
            return super(_Function, _with_modes(cls)).apply(*args)
    context = _Context(tuple(map(_needs_grad, args)))
    results = _apply_in_trace(_generated(cls, context), *args)[: context._spmd.count]
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
    """What `forward` said about its results.

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
    """The context that `forward` gets.

    Args:
        needs_input_grad: for each argument whether some transform differentiates it.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self._spmd, self.needs_input_grad = _Notes(), needs_input_grad

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
class _Place:
    """Stands for a tensor that was saved: an argument, or else a result, by its number."""

    is_argument: bool
    number: int


def _generated(cls: Any, context: _Context) -> Any:
    """A function like `cls` for one call, with `setup_context`."""
    notes = context._spmd
    held: dict[str, Any] = {}
    outputs: list[Any] = []

    def forward(*args: Any) -> tuple[Any, ...]:
        results = cls.forward(context, *args)
        notes.is_tuple = isinstance(results, tuple)
        outputs[:] = results if notes.is_tuple else (results,)
        notes.count = len(outputs)
        places = {id(x): _Place(False, n) for n, x in enumerate(outputs) if isinstance(x, torch.Tensor)}
        places |= {id(x): _Place(True, n) for n, x in enumerate(args) if isinstance(x, torch.Tensor)}

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in places:
                places[id(leaf)] = _Place(False, len(outputs))
                outputs.append(leaf)
            return places[id(leaf)]

        attributes = {name: value for name, value in vars(context).items() if name not in ("_spmd", "needs_input_grad")}
        held.update(attributes=tree_map(place, attributes))
        notes.saved, notes.dirty, notes.constant = tree_map(place, (notes.saved, notes.dirty, notes.constant))
        return tuple(outputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        def take(leaf: Any) -> Any:
            return (inputs if leaf.is_argument else output)[leaf.number] if isinstance(leaf, _Place) else leaf

        for name, value in tree_map(take, held["attributes"]).items():
            setattr(ctx, name, value)
        ctx.save_for_backward(*map(take, notes.saved))
        ctx.mark_dirty(*map(take, notes.dirty))
        ctx.mark_non_differentiable(*map(take, notes.constant))
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *cotangents: Any) -> Any:
        if any(cotangent is not None for cotangent in cotangents[notes.count :]):
            raise _refusal(cls, "is differentiated twice, and saves what is neither an argument nor a result")
        given = cotangents[: notes.count]
        if notes.materializes:
            given = tuple(_zeros(x) if g is None else g for g, x in zip(given, outputs, strict=False))
        return cls.backward(ctx, *given)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _refusal(cls, "is differentiated in forward mode")

    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise _refusal(cls, "is batched by vmap")

    methods: dict[str, Any] = {"forward": forward, "setup_context": setup_context, "jvp": jvp, "vmap": vmap}
    methods["backward"] = once_differentiable(backward) if _is_once_differentiable(cls.backward) else backward
    return type(cls.__name__, (_Function,), {name: staticmethod(method) for name, method in methods.items()})


def _is_once_differentiable(backward: Any) -> bool:
    while backward is not None and getattr(backward, "__code__", None) is not _ONCE:
        backward = getattr(backward, "__wrapped__", None)
    return backward is not None


_ONCE = once_differentiable(lambda ctx: None).__code__


def _refusing_twice(cls: Any) -> Any:
    """A function under `once_differentiable` that refuses second derivatives; torch.func makes them zeros."""

    def backward(ctx: Any, *cotangents: Any) -> Any:
        sources = [x for x in (*cotangents, *ctx.saved_tensors) if _needs_grad(x)]
        refuse = lambda x: _OnceDifferentiated.apply(cls.__name__, x, *sources)  # noqa: E731
        return tree_map_only(torch.Tensor, refuse, cls.backward(ctx, *cotangents))

    return type(cls.__name__, (cls,), {"backward": staticmethod(backward)})


class _OnceDifferentiated(_Function):  # type: ignore[misc]
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
            f"torch.autograd.Function {ctx.name} is differentiated twice at {where(user_source())}, and its backward "
            "is marked with once_differentiable. Write a backward of operators that can be differentiated."
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _OnceDifferentiated.backward(ctx, None)


def _zeros(x: Any) -> Any:
    return torch.zeros_like(x) if isinstance(x, torch.Tensor) else None


def _needs_grad(x: Any) -> bool:
    """Whether some transform differentiates a tensor."""
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
