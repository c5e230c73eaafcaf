"""Torch's state around a call of a jitted function: what of it decides the program, and work that it does not touch.

What kernels read when they run (TF32, the number of threads, warnings of the deterministic mode) holds for a program as
it does for torch itself, and needs no part in the choice of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

T = TypeVar("T")
R = TypeVar("R")

# Global names: a call of a jitted function reads them all, and an attribute of torch._C costs as much as its call.
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
    """What decides, beside the arguments, which operators a function consists of; it compares by value.

    Autocast, the default dtype and device, function modes, the deterministic mode, and which kernels may be chosen.
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
    """The function modes; one that is only the default device is that device."""
    return tuple(mode.device if type(mode) is DeviceContext else mode for mode in _get_current_function_mode_stack())


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """A context without autocast, function modes, inference mode and gradients, whatever there is around it."""
    with torch._C._DisableAutocast(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        yield


def run_isolated(function: Callable[[T], R], argument: T) -> R:
    """`function(argument)` in the context `isolated`, which costs little where nothing is around it."""
    if _any_autocast() or _function_modes() or _is_inference():
        with isolated():
            return function(argument)
    if not _is_grad_enabled():
        return function(argument)
    _set_grad_enabled(False)
    try:
        return function(argument)
    finally:
        _set_grad_enabled(True)
