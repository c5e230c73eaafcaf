"""`fori_loop`: a loop over a range of integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from spmd.api.control_flow.known_length import loop
from spmd.api.control_flow.leaves import check_callable, device_of, integer_scalar
from spmd.api.control_flow.unknown_length import loop_while
from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.job.tracebacks import hides_internals_of_own_errors
from spmd.tracing.source import where

_CALL = "spmd.fori_loop"
_Value = TypeVar("_Value")


@overload
def fori_loop(
    lower: int | Tensor,
    upper: int | Tensor,
    body_fun: Callable[[Tensor, Tensor], Tensor],
    init_val: complex,
    *,
    unroll: int | bool | None = None,
) -> Tensor: ...


@overload
def fori_loop(
    lower: int | Tensor,
    upper: int | Tensor,
    body_fun: Callable[[Tensor, _Value], _Value],
    init_val: _Value,
    *,
    unroll: int | bool | None = None,
) -> _Value: ...


@hides_internals_of_own_errors
def fori_loop(
    lower: int | Tensor,
    upper: int | Tensor,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """Call `val = body_fun(i, val)` for each integer of a range, and return the last `val`; `jax.lax.fori_loop`.

    With integers of Python it is a `scan` of known length, and differentiable; with tensors a `while_loop`, which in
    a function under `jit` is differentiable in forward mode only.

    Args:
        lower: the first `i`, an integer or a 0-d tensor of integers.
        upper: the integer behind the last `i`. No trip is made if it is not above `lower`.
        body_fun: one trip; `i` is a 0-d tensor of integers.
        init_val: the first value, as of `while_loop`.
        unroll: as of `scan`; only with integers of Python.

    Returns:
        The last value.

    Raises:
        TraceError: a bound is no integer, or a tensor although trips are to be unrolled; the value does not keep its
            structure, shapes and dtypes.

    >>> import torch
    >>> fori_loop(1, 4, lambda i, x: x * i, torch.tensor([1.0, 2.0]))
    tensor([ 6., 12.])
    """
    check_callable(_CALL, [("body_fun", body_fun)])
    lower, upper = (integer_scalar(bound, _CALL, name) for bound, name in ((lower, "lower"), (upper, "upper")))
    device = device_of(init_val)
    if not isinstance(lower, Tensor) and not isinstance(upper, Tensor):
        numbers = torch.arange(lower, max(lower, upper), device=device)
        once = 1 if unroll is None else unroll
        return loop(_CALL, "body_fun", lambda val, i: (body_fun(i, val), None), init_val, numbers, unroll=once)[0]
    if unroll is not None:
        raise TraceError(
            f"{_CALL} at {where()}: unroll={unroll!r:.60} needs integers of Python for lower and upper (got a tensor, "
            "whose value is not known when the program is made)."
        )
    if isinstance(lower, Tensor) and isinstance(upper, Tensor) and lower.dtype != upper.dtype:
        raise TraceError(
            f"{_CALL} at {where()}: lower and upper must have one dtype (got {TensorMeta.of(lower)} and "
            f"{TensorMeta.of(upper)})."
        )
    dtype = next(bound.dtype for bound in (lower, upper) if isinstance(bound, Tensor))
    first, end = (torch.as_tensor(bound, dtype=dtype) for bound in (lower, upper))

    def trip(state: dict[str, Any]) -> dict[str, Any]:
        return {"i": state["i"] + 1, "val": body_fun(state["i"], state["val"])}

    return loop_while(_CALL, lambda state: state["i"] < end, trip, {"i": first, "val": init_val})["val"]
