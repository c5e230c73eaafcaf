"""Torch's state per thread and per process: read before a function is traced; a thread's own is restored after it.

A function that raises inside torch may leave dispatch keys, functorch interpreters or modes changed. A frame of the
traceback may even hold a guard, which would restore its saved state only when the exception is garbage-collected.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any

import attrs
import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils import _device
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

_C: Any = torch._C
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


@attrs.frozen
class Setting:
    """One piece of torch's state.

    Args:
        name: its name in messages.
        read: returns its value.
        restore: sets it to a value that `read` has returned; None if it is restored elsewhere or not at all.
        same: whether the second of two values that `read` has returned is as the first.
        setters: the names of the C functions that set it for all threads; none if each thread has its own.
    """

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], None] | None = None
    same: Callable[[Any, Any], bool] = operator.eq
    setters: frozenset[str] = frozenset()


@attrs.frozen
class TorchState:
    """Torch's state at some time.

    Args:
        values: the value of each of `SETTINGS`, in order.
    """

    values: tuple[Any, ...]

    @classmethod
    def now(cls) -> TorchState:
        """The current state."""
        return cls(tuple(setting.read() for setting in SETTINGS))

    def changed(self) -> tuple[Setting, ...]:
        """The settings whose current values differ from this state."""
        pairs = zip(SETTINGS, self.values, strict=True)
        return tuple(setting for setting, value in pairs if not setting.same(value, setting.read()))

    def restore(self, shared: Collection[Setting] = ()) -> None:
        """Restore the settings of this thread, and some of those that all threads share, which others may change."""
        for setting, value in zip(SETTINGS, self.values, strict=True):
            restores = setting.restore is not None and (not setting.setters or setting in shared)
            if restores and not setting.same(value, setting.read()):
                setting.restore(value)  # type: ignore[misc]


@contextlib.contextmanager
def restored() -> Iterator[TorchState]:
    """A context manager that restores this thread's state on exit, also after an exception; yields that at entry."""
    with _C._PreserveDispatchKeyGuard():
        state = TorchState.now()
        try:
            yield state
        except BaseException as error:
            release_guards(error)
            raise
        finally:
            state.restore()


def release_guards(error: BaseException | None) -> None:
    """Clear torch's frames in an error's traceback, so that guards in them restore their saved state now."""
    pending, seen = [error], set()
    while pending:
        error = pending.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        pending += [error.__cause__, error.__context__]
        traceback: TracebackType | None = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename.startswith(_TORCH):
                with contextlib.suppress(RuntimeError):  # the frame is still running, further up the stack
                    traceback.tb_frame.clear()
            traceback = traceback.tb_next


def _flag(name: str, read: str, write: str) -> Setting:
    """A setting that is read and written by two functions of `torch._C`, given by name."""
    return Setting(name, getattr(_C, read), getattr(_C, write))


def _shared(name: str, read: str, write: str) -> Setting:
    """A flag that all threads share."""
    return attrs.evolve(_flag(name, read, write), setters=frozenset({write}))


def _stack(name: str, read: Callable[[], list[Any]], pop: Callable[[], Any], push: Callable[[Any], None]) -> Setting:
    """A setting that is a stack of modes; modes compare by identity."""

    def restore(saved: list[Any]) -> None:
        for _ in read():
            pop()
        for mode in saved:
            push(mode)

    return Setting(name, read, restore)


def _dispatch_keys() -> tuple[Any, Any]:
    return _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()


def _pop_interpreters(depth: int) -> None:
    """Leave the innermost transforms; torch 2.11's `pop_dynamic_layer_stack_and_undo_to_depth` fails."""
    while _C._functorch.get_dynamic_layer_stack_depth() > depth:
        transform = _C._functorch.peek_interpreter_stack().key().name
        getattr(_C._functorch, _LEAVES[transform])()


_LEAVES = {
    "Vmap": "_vmap_decrement_nesting",
    "Grad": "_grad_decrement_nesting",
    "Jvp": "_jvp_decrement_nesting",
    "Functionalize": "_func_decrement_nesting",
}
"""What leaves a transform of each type."""


def _exit_dual_levels(level: int) -> None:
    while forward_ad._current_level > level:
        forward_ad.exit_dual_level()


def _restore_jvp_nesting(depth: int) -> None:
    eager_transforms.JVP_NESTING = depth


_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mtia")


def _autocast() -> tuple[Any, ...]:
    devices = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES]
    return (*devices, torch.is_autocast_cache_enabled())


def _restore_autocast(saved: tuple[Any, ...]) -> None:
    for device, enabled, dtype in saved[:-1]:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(saved[-1])


def _default_device() -> tuple[Any, Any]:
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), _device.CURRENT_DEVICE


def _same_device(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    return before[0] is now[0]  # the other is a global that every `with torch.device(...)` sets, in any thread


def _restore_default_device(saved: tuple[Any, Any]) -> None:
    torch._GLOBAL_DEVICE_CONTEXT.device_context, _device.CURRENT_DEVICE = saved


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _restore_deterministic(saved: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(saved[0], warn_only=saved[1])


_PRECISIONS = (("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"),
               ("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"))  # fmt: skip


def _precision() -> tuple[Any, ...]:
    """The precision of float32 products, from both of torch's interfaces; the older raises once the newer is used."""
    try:
        older = torch.get_float32_matmul_precision(), _C._get_cudnn_allow_tf32()
    except RuntimeError:
        older = None
    return older, tuple(_C._get_fp32_precision_getter(*place) for place in _PRECISIONS)


def _restore_precision(saved: tuple[Any, ...]) -> None:
    older, newer = saved
    if older is not None:
        torch.set_float32_matmul_precision(older[0])
        _C._set_cudnn_allow_tf32(older[1])
    for place, precision in zip(_PRECISIONS, newer, strict=True):
        if _C._get_fp32_precision_getter(*place) != precision:
            _C._set_fp32_precision_setter(*place, precision)


def _seeds() -> tuple[tuple[int, bool], ...]:
    """For each of torch's default generators the seed, and whether it is in its first state."""
    used = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    # torch 2.11's `equal` includes the dispatch key of named tensors again, where it was excluded
    with _C._PreserveDispatchKeyGuard(), _C.DisableTorchFunction(), _disable_current_modes():
        return tuple((generator.initial_seed(), _is_fresh(generator)) for generator in (torch.default_generator, *used))


def _is_fresh(generator: torch.Generator) -> bool:
    first = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(first.get_state(), generator.get_state())


def _same_seeds(before: tuple[tuple[int, bool], ...], now: tuple[tuple[int, bool], ...]) -> bool:
    """Test whether draws lead from one to the other, as those of other threads."""
    pairs = zip(before, now, strict=False)
    return all(seed == other and (was_fresh or not fresh) for (seed, was_fresh), (other, fresh) in pairs)


GENERATOR = "torch's random generator"

SETTINGS = (
    Setting("torch.func's transforms", _C._functorch.get_dynamic_layer_stack_depth, _pop_interpreters),
    Setting("torch.func's nesting of jvp", lambda: eager_transforms.JVP_NESTING, _restore_jvp_nesting),
    Setting("forward-mode differentiation", lambda: forward_ad._current_level, _exit_dual_levels),
    _stack("the dispatch modes", _get_current_dispatch_mode_stack, _pop_mode, _push_mode),
    _stack("the function modes", _get_current_function_mode_stack, _pop_function_mode, _push_function_mode),
    Setting("the default device", _default_device, _restore_default_device, _same_device),
    _flag("the calls of __torch_function__", "_get_torch_function_state", "_set_torch_function_state"),
    Setting("the dispatch keys", _dispatch_keys),  # `restored` restores them by a guard: some have no Python name
    _flag("the grad mode", "is_grad_enabled", "_set_grad_enabled"),
    _flag("the forward grad mode", "_is_fwd_grad_enabled", "_set_fwd_grad_enabled"),
    Setting("the inference mode", torch.is_inference_mode_enabled),
    Setting("autocast", _autocast, _restore_autocast),
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype,
            setters=frozenset({"_set_default_dtype"})),
    Setting("the deterministic mode", _deterministic, _restore_deterministic,
            setters=frozenset({"_set_deterministic_algorithms"})),
    _shared("the filling of new memory", "_get_deterministic_fill_uninitialized_memory",
            "_set_deterministic_fill_uninitialized_memory"),
    Setting("the precision of float32 products", _precision, _restore_precision, setters=frozenset({
        "_set_float32_matmul_precision", "_set_cublas_allow_tf32", "_set_cudnn_allow_tf32", "_set_onednn_allow_tf32",
        "_set_fp32_precision_setter"})),
    _shared("torch.backends.cudnn.enabled", "_get_cudnn_enabled", "_set_cudnn_enabled"),
    _shared("torch.backends.cudnn.benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    _shared("torch.backends.cudnn.deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    _shared("torch.backends.mkldnn.enabled", "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    _shared("the flash attention kernels", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    _shared("the memory-efficient attention kernels", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    _shared("the math attention kernels", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    _shared("the cuDNN attention kernels", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    _shared("the order of attention kernels", "_get_sdp_priority_order", "_set_sdp_priority_order"),
    Setting(GENERATOR, _seeds, same=_same_seeds,
            setters=frozenset({"manual_seed", "seed", "set_state", "graphsafe_set_state"})),
)  # fmt: skip
"""All state that a traced function could leave changed, in the order in which it is restored."""
