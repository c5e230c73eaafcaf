"""Operators that call host functions: `debug_callback` and `check`, which have effects, and `pure_callback`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import attrs
import torch
from torch import Tensor
from torch.autograd import forward_ad

from spmd.core.pytree import leaf_meta, tree_flatten
from spmd.core.spec import TensorMeta
from spmd.core.value_types import is_continuous
from spmd.errors import SpmdError
from spmd.ir.host_functions import HostFunction, host_function

VMAP_METHODS = (None, "sequential", "expand_dims", "broadcast_all")

_LIBRARY = torch.library.Library("spmd_host", "FRAGMENT")


_Result = TypeVar("_Result")


@overload
def pure_callback(
    callback: Callable[..., object],
    result_shape_dtypes: TensorMeta | Tensor,
    *args: object,
    vmap_method: str | None = None,
    **kwargs: object,
) -> Tensor: ...


@overload
def pure_callback(
    callback: Callable[..., _Result],
    result_shape_dtypes: object,
    *args: object,
    vmap_method: str | None = None,
    **kwargs: object,
) -> _Result: ...


def pure_callback(
    callback: Callable[..., Any], result_shape_dtypes: Any, *args: Any, vmap_method: str | None = None, **kwargs: Any
) -> Any:
    """Call a function of the host from a program, and use what it returns; modelled on `jax.pure_callback`.

    The function gets tensors on the CPU and may return tensors, arrays or numbers. It must be pure: equal arguments
    give equal results. A program may call it any number of times, or not at all if its results are unused, and on
    every rank.

    Inside `jit` each rank calls it with global values, gathered where they are sharded, so results are those of one
    device. Inside `shard_map` each rank calls it with its own values. Outside of both it is called at once.

    Args:
        callback: the function. It must not call collectives, or functions under `jit` on a mesh of processes.
        result_shape_dtypes: what it returns: a `TensorMeta` or another tensor-like, or a pytree of them.
        args, kwargs: its arguments, pytrees with tensors. What is no tensor is passed as it was when the function that
            calls `pure_callback` was traced, but for dynamic numbers.
        vmap_method: what `torch.func.vmap` does: `"sequential"` calls it once for each example. With `"expand_dims"`
            it gets batches in dim 0, of length 1 for arguments that have none, and returns a batch; with
            `"broadcast_all"` all batches have the full length. None is an error.

    Returns:
        The results, as tensors. By type it is a tensor, or, for a pytree of them, what `callback` returns.

    Raises:
        SpmdError: the results are not as declared; the call is differentiated; vmap without a method.

    >>> import numpy
    >>> def cube(x):
    ...     return numpy.power(x.numpy(), 3)
    >>> x = torch.arange(3.0)
    >>> pure_callback(cube, TensorMeta((3,), torch.float32), x)
    tensor([0., 1., 8.])
    """
    if vmap_method not in VMAP_METHODS:
        raise SpmdError(f"vmap_method must be one of {VMAP_METHODS} (got {vmap_method!r}).")
    declared, structure = tree_flatten(result_shape_dtypes)
    metas = tuple(leaf_meta(leaf, "result_shape_dtypes of spmd.pure_callback") for leaf in declared)
    function, tensors = HostFunction.of(
        callback, args, kwargs, results=metas, result_structure=structure, vmap_method=vmap_method
    )
    return structure.unflatten(PURE_CALLBACK(tensors, function.number))


def debug_callback(callback: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Call a function of the host from a program, for its effect."""
    function, tensors = HostFunction.of(callback, args, kwargs)
    DEBUG_CALLBACK(tensors, function.number)


def check_values(valid: Tensor, values: Sequence[Tensor], error: type[Exception], message: str) -> None:
    """Raise an error in a program if values are not valid: on the ranks that hold such values, with those of the rank.

    Args:
        valid: says of each value whether it is valid.
        values: what the error shows; at most one tensor.
        error: its type.
        message: its text.
    """
    function, tensors = HostFunction.of(_refuse, (error, message, *values), {})
    CHECK([valid, *tensors], function.number)


def _refuse(error: type[Exception], message: str, *values: Tensor) -> None:
    raise error(message + "".join(f", but found invalid values:\n{value}" for value in values))


def _check(values: list[Tensor], number: int) -> None:
    valid, *shown = values
    if not valid.all():
        host_function(number)(shown)


def _call_for_effect(values: list[Tensor], number: int) -> None:
    function = host_function(number)
    result = function(values)
    if result is not None:
        raise SpmdError(
            f"{function.name}, called by spmd.debug.callback, returned {result!r:.60}, and nothing can use it. Return "
            "None, or take spmd.pure_callback for results."
        )


def _compute(values: list[Tensor], number: int) -> list[Tensor]:
    function = host_function(number)
    results, structure = tree_flatten(function(values))
    if structure != function.result_structure:
        raise SpmdError(
            f"{function.name}, called by spmd.pure_callback, returned {structure}, where result_shape_dtypes has "
            f"{function.result_structure}."
        )
    device = values[0].device if values else None
    pairs = zip(results, function.results, strict=True)
    return [_checked(result, meta, function.name, device) for result, meta in pairs]


def _checked(result: Any, meta: TensorMeta, name: str, device: torch.device | None) -> Tensor:
    """A result as a tensor of its own: a program may write to it."""
    found = torch.as_tensor(result)
    if TensorMeta.of(found) != meta:
        raise SpmdError(
            f"{name}, called by spmd.pure_callback, returned {TensorMeta.of(found)}, where result_shape_dtypes has "
            f"{meta}. Declare what it returns, or convert it in {name}."
        )
    return found.detach().to(device, copy=True)


def _fake(values: list[Tensor], number: int) -> list[Tensor]:
    device = values[0].device if values else None
    return [torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in host_function(number).results]


def _without_derivative(name: str) -> Callable[..., None]:
    """The autograd kernel of an operator: values have no gradient here."""

    def kernel(keyset: Any, values: list[Tensor], number: int) -> None:
        operator = getattr(torch.ops.spmd_host, name).default
        operator.redispatch(keyset & torch._C._after_autograd_keyset, values, number)

    return kernel


def _refuse_derivative(keyset: Any, values: list[Tensor], number: int) -> list[Tensor]:
    """The autograd kernel: an error where a derivative goes through."""
    function = host_function(number)
    continuous = any(is_continuous(meta.dtype) for meta in function.results)
    if continuous and any(map(_is_differentiated, values)):
        raise SpmdError(
            f"{function.name}, called by spmd.pure_callback, is differentiated, and a function of the host has no "
            "derivative. Call it in a torch.autograd.Function with a backward of its own, or pass it x.detach()."
        )
    return PURE_CALLBACK.redispatch(keyset & torch._C._after_autograd_keyset, values, number)  # type: ignore[no-any-return]


def _is_differentiated(x: Tensor) -> bool:
    if torch.is_grad_enabled() and x.requires_grad:
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _examples(size: int, in_dims: Any, values: list[Tensor]) -> list[list[Tensor]]:
    """The arguments of each example of a batch."""
    pairs = list(zip(values, in_dims[0], strict=True))
    return [[x if dim is None else x.select(dim, n) for x, dim in pairs] for n in range(size)]


def _call_for_each(info: Any, in_dims: Any, values: list[Tensor], number: int) -> tuple[None, None]:
    """The rule for vmap of `debug_callback`: one call for each example, as in JAX."""
    for example in _examples(info.batch_size, in_dims, values):
        DEBUG_CALLBACK(example, number)
    return None, None


def _check_batch(info: Any, in_dims: Any, values: list[Tensor], number: int) -> tuple[None, None]:
    """The rule for vmap of `check`: one check of all examples."""
    pairs = zip(values, in_dims[0], strict=True)
    CHECK([x if dim is None else x.movedim(dim, 0) for x, dim in pairs], number)
    return None, None


def _batch(info: Any, in_dims: Any, values: list[Tensor], number: int) -> tuple[list[Tensor], list[int]]:
    """The rule for vmap of `pure_callback`."""
    function, size = host_function(number), info.batch_size
    if function.vmap_method is None:
        raise SpmdError(
            f"{function.name}, called by spmd.pure_callback, is batched by vmap. Say how: vmap_method='sequential', "
            "'expand_dims' or 'broadcast_all'."
        )
    if function.vmap_method == "sequential":
        calls = [PURE_CALLBACK(example, number) for example in _examples(size, in_dims, values)]
        results = [torch.stack(parts) for parts in zip(*calls, strict=True)]
    else:
        length = size if function.vmap_method == "broadcast_all" else 1
        pairs = zip(values, in_dims[0], strict=True)
        moved = [x.expand(length, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in pairs]
        metas = tuple(TensorMeta((size, *meta.shape), meta.dtype) for meta in function.results)
        batched = attrs.evolve(function, results=metas)
        results = PURE_CALLBACK(moved, batched.number)
    return results, [0] * len(results)


def _define(schema: str, kernel: Any, fake: Any, autograd: Any, batch: Any) -> torch._ops.OpOverload:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"spmd_host::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"spmd_host::{name}", batch, lib=_LIBRARY)
    return getattr(torch.ops.spmd_host, name).default  # type: ignore[no-any-return]


DEBUG_CALLBACK = _define(
    "debug_callback(Tensor[] values, int function) -> ()",
    _call_for_effect,
    lambda values, number: None,
    _without_derivative("debug_callback"),
    _call_for_each,
)
CHECK = _define(
    "check(Tensor[] values, int function) -> ()",
    _check,
    lambda values, number: None,
    _without_derivative("check"),
    _check_batch,
)
PURE_CALLBACK = _define(
    "pure_callback(Tensor[] values, int function) -> Tensor[]", _compute, _fake, _refuse_derivative, _batch
)
HOST_CALLS = (DEBUG_CALLBACK, CHECK, PURE_CALLBACK)
"""The operators whose last argument is the number of a host function."""
