"""The initializers that a module brings along, and a context in which they run in a trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from spmd.core.modules import Slot, tied_names
from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.tracing.source import where

_RESETS = ("reset_parameters", "_reset_parameters")
_WHOLE = "init_weights"
"""The method that initializes a model in transformers, timm, torchtitan and mmengine."""


def run_own_initializers(module: nn.Module) -> None:
    """Call `reset_parameters` of all submodules, inner ones first, and `init_weights` of the outermost that have it.

    This is the order in which constructors do it. A tied tensor is reset by the submodule of its first name: the
    constructors of others have written to a tensor that is gone.
    """
    slots = named_slots(module)
    tied = [slots[name] for name in tied_names(module)]
    module.apply(lambda owner: _reset(owner, tied))
    _call_whole(module)


def _reset(owner: nn.Module, tied: Sequence[Slot]) -> None:
    """Reset the parameters of a submodule but those that are tied to earlier ones."""
    reset = next((getattr(owner, name) for name in _RESETS if callable(getattr(owner, name, None))), None)
    if reset is None or not _needs_no_arguments(reset):
        return
    stores = (owner._parameters, owner._buffers)
    shared = [(held, name, held[name]) for held, name in tied if any(held is store for store in stores)]
    for held, name, tensor in shared:
        held[name] = nn.Parameter(torch.empty_like(tensor)) if isinstance(tensor, nn.Parameter) else tensor.clone()
    reset()
    for held, name, tensor in shared:
        held[name] = tensor


def _call_whole(owner: nn.Module) -> None:
    method = getattr(owner, _WHOLE, None)
    if callable(method) and _needs_no_arguments(method):
        method()
        return
    for child in owner.children():
        _call_whole(child)


def _needs_no_arguments(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind()
    except TypeError:
        return False
    return True


def named_slots(module: nn.Module) -> dict[str, Slot]:
    """The place of each parameter and buffer, by its dotted name; tied ones have several."""
    return {
        f"{prefix}.{name}" if prefix else name: (held, name)
        for prefix, owner in module.named_modules()
        for held in (owner._parameters, owner._buffers)
        for name, tensor in held.items()
        if tensor is not None
    }


class Replaced:
    """A context in which a module holds new tensors; if it ends by an error, all attributes are what they were.

    Args:
        module: the module.
        new: makes the tensor that is held in place of another.
    """

    def __init__(self, module: nn.Module, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._owners, self._new = list(module.modules()), new
        self._slots = list(named_slots(module).values())

    def __enter__(self) -> None:
        stores = [store for owner in self._owners for store in (vars(owner), owner._parameters, owner._buffers)]
        self._saved = [(store, dict(store)) for store in stores]
        made: dict[int, torch.Tensor] = {}
        self._held = [held[name] for held, name in self._slots]
        for (held, name), tensor in zip(self._slots, self._held, strict=True):
            if id(tensor) not in made:
                new = self._new(tensor)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
            held[name] = made[id(tensor)]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for (held, name), tensor in zip(self._slots, self._held, strict=True):
                held[name] = tensor
            return
        for store, values in self._saved:
            store.clear()
            store.update(values)


class AssignsData(TorchFunctionMode):
    """A mode in which `x.data = value` writes the value to `x`, as a program can."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func != _SET_DATA:  # a new object each time
            return func(*args, **(kwargs or {}))
        target, value = args
        if (target.shape, target.dtype) != (value.shape, value.dtype):
            raise TraceError(
                f"x.data = ... at {where()} makes {TensorMeta.of(target)} a tensor {TensorMeta.of(value)}. Assign one "
                "of its shape and dtype, or a new parameter: module.weight = torch.nn.Parameter(value)."
            )
        with torch.no_grad():
            target.copy_(value)


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
