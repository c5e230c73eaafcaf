"""What happens to each torch function that a traced function calls: closed-over tensors are lifted into the trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from spmd.collectives.axis_types import AxisType
from spmd.core.mesh import Coordinate
from spmd.core.pytree import tree_leaves
from spmd.core.spec import NESTED
from spmd.errors import TraceError
from spmd.ir.graph import Value, iterate_leaves, map_leaves
from spmd.ir.variants import Unevenness
from spmd.tracing.active_transforms import unwrapped
from spmd.tracing.assignments import fill_masked
from spmd.tracing.autograd_functions import needs_grad
from spmd.tracing.ctc import ctc_loss
from spmd.tracing.differentiable import DIFFERENTIABLE
from spmd.tracing.distributions import VALUE_DEPENDENT, for_distributions
from spmd.tracing.draw_scopes import draw_scope
from spmd.tracing.dropped_attention import dropped_attention
from spmd.tracing.effects import refuse_rebinding
from spmd.tracing.nested_tracers import inlined
from spmd.tracing.numbers import DIFFERENTIABLE_IN_TENSORS, has_number, tensor_of_numbers
from spmd.tracing.packed_sequences import OF_KNOWN_LENGTHS
from spmd.tracing.recorder import Recorder
from spmd.tracing.scalar_indexes import assign_at_scalars, item_at_scalars
from spmd.tracing.source import user_source, where
from spmd.tracing.traced_tensor import describe, is_traced, known_value, list_of, refuse_reading, retyped

Casting: TypeAlias = Sequence[tuple[str, AxisType]]
"""The axes along which a tensor is cast, and to what."""


class ClosureLifting(TorchFunctionMode):
    """Wraps each closed-over tensor for functionalization, and raises for calls that a program cannot represent.

    Functionalization tracks only tensors that it has wrapped; without this, `mask = closed_over > 0; mask[0] = True`
    would reach the recorder as an in-place write.

    Args:
        recorder: records the operators.
        coordinate: that of the rank with whose shards manual regions are traced; None for zero.

    Attributes:
        unevenness: how the shapes of shards in manual regions differ between ranks; None if they do not.
        in_backward: makes the context in which Python code of backward passes runs.
        marks_no_grad: whether the graph tells what is computed under `torch.no_grad`: it is differentiated again.
        functions: the names of the autograd.Functions of the user's that were called.
        hides_gradients: whether the function has read `x.data`.
        changes_grad_mode: whether it has changed the grad mode.
    """

    def __init__(self, recorder: Recorder, coordinate: Coordinate | None) -> None:
        super().__init__()
        self.recorder: Recorder = recorder
        self.coordinate: Coordinate | None = coordinate
        self.unevenness: Unevenness | None = None
        self.gather = None
        self._under_transform = peek_interpreter_stack() is not None
        # Keyed by id: each entry keeps its closed-over tensor alive, so that Python does not reuse the id.
        self._lifted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tracked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._constructs = False
        self._given: dict[int, torch.Tensor] = {}
        self._casts: dict[tuple[int, Casting], torch.Tensor] = {}
        self.marks_no_grad = False
        self.functions: list[str] = []
        self.hides_gradients = self.changes_grad_mode = False
        self.in_backward: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def close(self) -> None:
        """Let go of all tensors, as `Recorder.close` does."""
        self._lifted.clear()
        self._tracked.clear()
        self.recorder.close()

    def functional(self, fake: torch.Tensor) -> torch.Tensor:
        """Wrap a fake tensor for functionalization; `check_writes` raises for writes to it, unless it is made here."""
        with torch._C.DisableTorchFunction():
            wrapped = retyped(FunctionalTensor.to_functional(fake))
        if not self._constructs:
            self._tracked.append((fake, wrapped))
        return wrapped

    def value(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor of the trace as it is now, under transforms too."""
        return self.recorder.value(self.finish(unwrapped(tensor)))

    def finish(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that functionalization has wrapped, after all pending writes to it."""
        if not isinstance(tensor, FunctionalTensor):
            return tensor
        # Views are made again, which no transform may wrap; a trace would take what fake tensors are made of.
        with temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunction():
            torch._sync(tensor)
        return torch._from_functional_tensor(tensor.elem)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.marks_no_grad and self.recorder.in_no_grad is torch.is_grad_enabled():
            self.recorder.in_no_grad = not self.recorder.in_no_grad
            try:
                return self.__torch_function__(func, types, args, kwargs)
            finally:
                self.recorder.in_no_grad = not self.recorder.in_no_grad
        if func is _SET_GRAD_MODE:
            self.changes_grad_mode = True
        if func == _DATA:
            self.hides_gradients = True
            if self.marks_no_grad and needs_grad(args[0]):
                raise TraceError(
                    f"x.data at {where(user_source())}, in the body of a loop or a branch that is differentiated, is "
                    "no tensor of the program. Write x.detach()."
                )
        if self.recorder.in_no_grad and _is_write(func) and needs_grad(args[0]):
            self.functions.append(f"a write under torch.no_grad at {where(user_source())}")
        if self._given:
            args, kwargs = map_leaves(self.given, args), map_leaves(self.given, kwargs or {})
        if isinstance(func, torch._ops.HigherOrderOperator):
            return inlined(func)(*args, **(kwargs or {}))
        if any(issubclass(kind, NestedTensor) for kind in types):
            raise TraceError(f"A tensor at {where(user_source())} is {NESTED}")
        refuse_rebinding(func, args, _is_outside)
        if self._under_transform:
            for leaf in iterate_leaves((args, kwargs or {})):
                _refuse_transformed(leaf)
        if func is torch.Tensor.__deepcopy__:
            return _deep_copy(args[0])
        if func is torch.Tensor.requires_grad_ and args[1:] in ((), (True,)) and not kwargs and args[0].requires_grad:
            return args[0]  # torch raises under torch.func, also where nothing would change
        if func is torch.Tensor.__repr__ and is_traced(args[0]):
            return describe(args[0])
        if func is torch.Tensor.__format__ and is_traced(args[0]) and not args[1]:
            return describe(args[0])
        if func in VALUE_DEPENDENT:
            found = for_distributions(func, args, kwargs or {})
            if found is not NotImplemented:
                return found
        if func is torch.Tensor.tolist and is_traced(args[0]) and (known := known_value(args[0])) is not None:
            return list_of(known)
        refuse_reading(func, args)
        if func in (torch.Tensor.backward, torch.autograd.backward):
            self._check_backward(args[0])
        if func in (torch.tensor, torch.as_tensor) and has_number(args):
            return tensor_of_numbers(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and _is_list_of_tensors(args):
            raise TraceError(
                f"torch.{func.__name__} of a list of tensors at {where(user_source())} needs their values, and a "
                "traced function has none. Use torch.stack or torch.cat."
            )
        if func in _SPLITTERS and any(isinstance(leaf, torch.Tensor) for leaf in (*args[1:], *(kwargs or {}).values())):
            raise TraceError(
                f"{func.__name__} at {where(user_source())} splits where a tensor says, and a program has static "
                "shapes. Pass the places as a tuple of integers."
            )
        if func in DIFFERENTIABLE_IN_TENSORS and has_number(args):
            return DIFFERENTIABLE_IN_TENSORS[func](*args, **(kwargs or {}))
        if func in _REPLACED:
            return _REPLACED[func](*map_leaves(self.lift, args), **map_leaves(self.lift, kwargs or {}))
        if func is F.scaled_dot_product_attention and draw_scope() is not None:
            found = dropped_attention(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        if func is torch.tensor and not any(isinstance(leaf, torch.Tensor) for leaf in iterate_leaves(args)):
            return self._construct(func, *args, **(kwargs or {}))
        if func is torch.Tensor.__setitem__ and fill_masked(*args):
            return None
        if func in _BY_SCALARS:
            found = _BY_SCALARS[func](*args)
            if found is not NotImplemented:
                return found
        if func in _RETAINS:
            with self.in_backward():  # which frees nothing: a transform from outside may come back to it
                given, position = dict(kwargs or {}), _RETAINS[func]
                if len(args) > position:
                    return func(*args[:position], True, *args[position + 1 :], **given)
                return func(*args, **{**given, "retain_graph": True})
        return DIFFERENTIABLE.get(func, func)(*args, **(kwargs or {}))

    def _construct(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """A tensor that torch makes of Python's values: the trace's own, to which the function may write."""
        self._constructs = True
        try:
            return func(*args, **kwargs)
        finally:
            self._constructs = False

    def _check_backward(self, outputs: Any) -> None:
        """TraceError for a backward pass that reaches no tensor of the function, or may reach parameters outside."""
        outside = any(tensor.requires_grad for tensor, _ in self._lifted.values())
        if outside or not any(leaf.requires_grad for leaf in tree_leaves(outputs)):
            found = "closes over tensors that require grad" if outside else "has no tensor here that requires grad"
            raise TraceError(
                f".backward() at {where(user_source())} writes gradients into tensors, and the function {found}: the "
                "gradients of tensors from outside would be lost. Pass parameters as arguments and use "
                "torch.func.grad, torch.func.grad_and_value or torch.autograd.grad, which return gradients; or call "
                "x.requires_grad_() on an argument, then .backward(), and return x.grad."
            )

    def check_writes(self) -> None:
        """TraceError if an argument or a closed-over tensor was written to."""
        for fake, wrapped in self._tracked:
            written = self.finish(wrapped)
            if written is not fake:
                raise self.recorder.mutation(fake, self.recorder.source_of(written))

    def take(self, leaf: torch.Tensor) -> torch.Tensor:
        """The tensor of the trace for one that the body of a loop or a branch closes over."""
        return self.lift(self.given(leaf))  # type: ignore[no-any-return]

    def cast(self, leaf: torch.Tensor, casts: Casting) -> torch.Tensor | None:
        """As of `RunningTrace`: None, but in a body of a loop or a branch, and where its function runs again."""
        return self._casts.get((id(leaf), tuple(casts)))

    def given(self, leaf: Any) -> Any:
        """The tensor that functions take in place of one from around the trace (`substituting`); others unchanged."""
        return self._given.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf

    @contextlib.contextmanager
    def substituting(
        self,
        tensors: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        casts: Sequence[tuple[int, Casting, int]] = (),
    ) -> Iterator[None]:
        """A context in which functions take the given tensors for others, of a trace around this one.

        Args:
            tensors: the others.
            given: those that functions take.
            casts: the number of a given tensor, how it is cast, and the number of the one that is so.
        """
        before = self._given, self._casts
        self._given = {**self._given, **{id(tensor): x for tensor, x in zip(tensors, given, strict=False)}}
        self._casts = {**self._casts, **{(id(given[base]), tuple(how)): given[cast] for base, how, cast in casts}}
        try:
            yield
        finally:
            self._given, self._casts = before

    def made(self, value: Value, device: torch.device) -> torch.Tensor:
        """The tensor of a value that the trace has computed."""
        return self._construct(lambda: self.functional(self.recorder.fake(value, device)))  # type: ignore[no-any-return]

    def lift(self, leaf: Any) -> Any:
        """The functional fake tensor for a tensor made outside of the trace; any other value unchanged."""
        if not _is_outside(leaf):
            return leaf
        if id(leaf) not in self._lifted:
            # No torch.func transform may wrap the new tensor, and no function mode of a shard_map body cast it.
            with temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunction():
                with _disable_current_modes():
                    fake = self.recorder.lift(leaf)
                self._lifted[id(leaf)] = (leaf, self.functional(fake))
        return self._lifted[id(leaf)][1]


def _deep_copy(x: torch.Tensor) -> torch.Tensor:
    """A copy; of a leaf of autograd another leaf. Of other tensors, of which torch makes none, it has the gradient."""
    copied = x.clone()
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(copied.detach(), x.requires_grad)
    if not (x.is_leaf and x.requires_grad):
        return copied
    return copied.detach() if peek_interpreter_stack() is not None else copied.detach().requires_grad_()


def _is_write(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_GRAD_MODE = torch._C._set_grad_enabled
_RETAINS = {torch.autograd.grad: 3, torch.Tensor.backward: 2, torch.autograd.backward: 2}
"""Backward passes, and the position of their argument `retain_graph`."""


def _refuse_transformed(leaf: Any) -> None:
    """TraceError for a tensor from outside that a transform has wrapped: one from outside, if not one of the trace."""
    held = unwrapped(leaf)
    if held is not leaf and not torch._is_functional_tensor(held) and not isinstance(held, FunctionalTensor):
        raise TraceError(
            "A jitted function closes over a tensor on which a transform acts, perhaps one from outside, at "
            f"{where(user_source())}. Pass it as an argument."
        )


def _is_outside(leaf: Any) -> bool:
    """Whether a value is a tensor that was made outside of the trace."""
    traced = type(leaf) not in _PLAIN or torch._is_functional_tensor(leaf) or is_functorch_wrapped_tensor(leaf)
    return not traced


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_REPLACED: Mapping[Any, Callable[..., Any]] = {**OF_KNOWN_LENGTHS, F.ctc_loss: ctc_loss, torch.ctc_loss: ctc_loss}
"""Functions that read the values of tensors, which may be closed over, and what is called in their place."""
_BY_SCALARS: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: item_at_scalars,
    torch.Tensor.__setitem__: assign_at_scalars,
}
"""Functions of items, and what is called in their place where scalars of the trace are indexes."""
_SPLITTERS = frozenset({torch.tensor_split, torch.Tensor.tensor_split})


def _is_list_of_tensors(args: tuple[Any, ...]) -> bool:
    listed = bool(args) and isinstance(args[0], (list, tuple))
    return listed and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args[0]))
