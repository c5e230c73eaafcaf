"""`scan`: a loop of known length that carries values and stacks results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from torch import Tensor

from spmd.api.control_flow.known_length import loop
from spmd.job.tracebacks import hides_internals_of_own_errors

_Carry = TypeVar("_Carry")
_Row = TypeVar("_Row")
_Result = TypeVar("_Result")


@overload
def scan(
    f: Callable[[Tensor, _Row], tuple[Tensor, _Result]],
    init: complex,
    xs: _Row | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    segments: int | None = None,
) -> tuple[Tensor, _Result]: ...


@overload
def scan(
    f: Callable[[_Carry, _Row], tuple[_Carry, _Result]],
    init: _Carry,
    xs: _Row | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    segments: int | None = None,
) -> tuple[_Carry, _Result]: ...


@hides_internals_of_own_errors
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    segments: int | None = None,
) -> tuple[Any, Any]:
    """Loop over the rows of `xs`, carry values from row to row, and stack a result of each; `jax.lax.scan`.

    In a function under `jit` it is one operation of the program, whose body is traced and planned once, whatever its
    length. Elsewhere Python runs it. It is differentiable.

    Args:
        f: one trip, `carry, y = f(carry, x)`.
        init: the first carry, a pytree of tensors and numbers. Its structure, shapes and dtypes are those of each
            carry that `f` returns. The dtype of a number is that which `f` returns for it.
        xs: a pytree of tensors; `x` is row `t` of each, `xs[t]`. None for a loop over nothing, `length` times.
        length: the number of trips; needed only without `xs`.
        reverse: whether rows are taken from the last to the first. `ys[t]` is the result of row `t` in either order.
        unroll: how many trips the program holds, side by side; True or 0 for all.
        segments: into how many runs of equal length reverse mode divides the trips, the last one may be shorter, in a
            function under `jit`. It keeps the carry at the start of each, and computes the trips of one again when it
            comes to them; about the square root of `length` needs the least memory. Trips that draw random numbers are
            not computed again.

    Returns:
        The last carry, and the pytree of stacked `y`s, each with `length` rows.

    Raises:
        TraceError: the carry does not keep its structure, shapes and dtypes; `f` returns no pair; lengths differ.

    >>> import torch
    >>> total, sums = scan(lambda total, x: (total + x, total + x), 0.0, torch.tensor([1.0, 2.0, 3.0]))
    >>> total, sums
    (tensor(6.), tensor([1., 3., 6.]))
    """
    return loop("spmd.scan", "f", f, init, xs, length, reverse, unroll, segments)
