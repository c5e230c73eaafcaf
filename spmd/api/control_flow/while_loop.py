"""`while_loop`: a loop whose length is data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from torch import Tensor

from spmd.api.control_flow.unknown_length import loop_while
from spmd.job.tracebacks import hides_internals_of_own_errors

_Value = TypeVar("_Value")


@overload
def while_loop(
    cond_fun: Callable[[Tensor], bool | Tensor], body_fun: Callable[[Tensor], Tensor], init_val: complex
) -> Tensor: ...


@overload
def while_loop(
    cond_fun: Callable[[_Value], bool | Tensor], body_fun: Callable[[_Value], _Value], init_val: _Value
) -> _Value: ...


@hides_internals_of_own_errors
def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    """Call `val = body_fun(val)` as long as `cond_fun(val)` is true, and return the last `val`; `jax.lax.while_loop`.

    In a function under `jit` it is one operation of the program, and each rank finds out for itself when it ends.
    Elsewhere Python runs it, and the host reads the condition. Under `vmap` it runs until the condition is false for
    all examples, and an example for which it is false keeps its value. In a shard_map body each rank decides by what
    it holds, and a rank that is done waits for no other: where the condition varies along an axis, the function may
    call no collective.

    Args:
        cond_fun: returns a boolean scalar.
        body_fun: returns the next value, with the structure, shapes and dtypes of the one it gets.
        init_val: the first value, a pytree of tensors and numbers. The dtype of a number is that which `body_fun`
            returns for it.

    Returns:
        The value for which the condition is false.

    Raises:
        TraceError: the value does not keep its structure, shapes and dtypes; the condition is no boolean scalar.

    >>> import torch
    >>> while_loop(lambda x: x.norm() > 1, lambda x: x / 2, torch.tensor([3.0, 4.0]))
    tensor([0.3750, 0.5000])
    """
    return loop_while("spmd.while_loop", cond_fun, body_fun, init_val)
