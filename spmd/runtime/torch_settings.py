"""Torch's global settings: those that a jitted program depends on, a context that shields work from them, generators.

Settings that kernels read when they run (TF32, the number of threads, warnings of the deterministic mode) apply to a
program as to eager torch, so programs are not cached by them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from spmd.ir.random_operators import is_random

R = TypeVar("R")

# Module globals for speed: each jitted call reads all, and looking up an attribute of torch._C costs as much as a call.
_any_autocast = torch._C._is_any_autocast_enabled
_default_dtype = torch.get_default_dtype
_deterministic = torch._C._get_deterministic_algorithms
_function_modes = torch._C._len_torch_function_stack
_flash = torch._C._get_flash_sdp_enabled
_efficient = torch._C._get_mem_efficient_sdp_enabled
_math = torch._C._get_math_sdp_enabled
_cudnn_attention = torch._C._get_cudnn_sdp_enabled
_cudnn = torch._C._get_cudnn_enabled
_mkldnn = torch._C._get_mkldnn_enabled
_is_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled
_is_inference = torch.is_inference_mode_enabled

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mtia", "mps")


def torch_settings() -> tuple[Any, ...]:
    """The settings that decide, beside the arguments, which operators a function runs; part of `jit`'s cache key.

    These are autocast, the default dtype and device, function modes, the deterministic mode, and the enabled backends
    of attention, cuDNN and oneDNN. The result is hashable and compares by value.
    """
    autocast, modes = _any_autocast(), _function_modes()
    flags = (
        autocast, modes, _default_dtype(), _deterministic(),
        _flash(), _efficient(), _math(), _cudnn_attention(), _cudnn(), _mkldnn(),
    )  # fmt: skip
    return (flags, _autocast_dtypes(), _modes()) if autocast or modes else flags


def _autocast_dtypes() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((d, torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES if torch.is_autocast_enabled(d))


def _modes() -> tuple[Any, ...]:
    """The active function modes; a `DeviceContext` is represented by its device, which compares by value."""
    return tuple(mode.device if type(mode) is DeviceContext else mode for mode in _get_current_function_mode_stack())


def are_modes_off() -> bool:
    """Whether autocast, function modes and inference mode are off."""
    return not (_any_autocast() or _function_modes() or _is_inference())


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the generator from which this thread draws on a device: inside of `drawing_from`, of that one."""
    own = _own_generator(device)
    return default_generator_state(device) if own is None else own.get_state()


def set_generator_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of the generator from which this thread draws on a device."""
    own = _own_generator(device)
    if own is None:
        set_default_generator_state(state, device)
    else:
        own.set_state(state)


def default_generator_state(device: torch.device) -> torch.Tensor:
    """The state of the default generator of a device."""
    return torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()


def set_default_generator_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of the default generator of a device."""
    (torch.cuda.set_rng_state if device.type == "cuda" else torch.set_rng_state)(state)


def _own_generator(device: torch.device) -> torch.Generator | None:
    """The generator of the innermost `drawing_from` of this thread, if there is one for a device."""
    modes = (mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, _DrawsFrom))
    return next((mode.generator for mode in modes if mode.generator.device.type == device.type), None)


@contextlib.contextmanager
def drawing_from(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """A context in which this thread draws from a state, and the default generator of a device stays as it is."""
    generator = torch.Generator(device)
    generator.set_state(state)
    with _DrawsFrom(generator):
        yield


class _DrawsFrom(TorchDispatchMode):
    """Random operators draw from a generator of their own; other threads draw from the default one meanwhile."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        drawing = _with_generator(func)
        if drawing is not None:
            return drawing(*args, **{**kwargs, "generator": self.generator})
        if func is torch.ops.aten.native_dropout.default:
            return _dropout(*args, **{**kwargs, "generator": self.generator})
        device = self.generator.device  # an operator that knows the default generator only
        before = default_generator_state(device)
        set_default_generator_state(self.generator.get_state(), device)
        try:
            return func(*args, **kwargs)
        finally:
            self.generator.set_state(default_generator_state(device))
            set_default_generator_state(before, device)


@lru_cache(maxsize=256)
def _with_generator(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The form of a random operator that takes a generator, beside the same arguments; None if there is none."""
    names = [argument.name for argument in op._schema.arguments if argument.name != "generator"]
    for overload in (op._overloadname, *op._overloadpacket.overloads()):
        form = getattr(op._overloadpacket, overload)
        every = [argument.name for argument in form._schema.arguments]
        if "generator" in every and [name for name in every if name != "generator"] == names:
            return form  # type: ignore[no-any-return]
    return None


def _dropout(x: torch.Tensor, p: float, train: bool | None, generator: torch.Generator) -> Any:
    """`native_dropout` with a generator, as the kernel of the CPU computes it."""
    scale = 0.0 if p == 1 else 1 / (1 - p)
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p, generator=generator)
    return x.mul(mask).mul_(scale), mask


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """A context in which autocast, function modes, inference mode, gradients and `torch.func` transforms are off."""
    with (
        torch._C._DisableAutocast(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        torch.no_grad(),
        temporarily_clear_interpreter_stack(),
    ):
        yield


def run_isolated(function: Callable[..., R], *arguments: Any) -> R:
    """Call `function(*arguments)` in the context `isolated`; cheap if at most gradients have to be turned off."""
    if not are_modes_off():
        with isolated():
            return function(*arguments)
    if not _is_grad_enabled():
        return function(*arguments)
    _set_grad_enabled(False)
    try:
        return function(*arguments)
    finally:
        _set_grad_enabled(True)
