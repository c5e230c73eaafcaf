"""`map`: a function of each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from spmd.api.control_flow.known_length import loop, number_of_rows
from spmd.api.control_flow.leaves import check_callable, device_of, leaves_of
from spmd.api.control_flow.results import Results
from spmd.core.pytree import tree_flatten, tree_map
from spmd.errors import TraceError
from spmd.job.tracebacks import hides_internals_of_own_errors
from spmd.tracing.source import where

_CALL = "spmd.map"
_Row = TypeVar("_Row")
_Result = TypeVar("_Result")


@hides_internals_of_own_errors
def map(f: Callable[[_Row], _Result], xs: _Row, *, batch_size: int | None = None) -> _Result:
    """Call a function of each row, one after the other, and stack its results; `jax.lax.map`.

    It is `scan` without a carry. What `torch.func.vmap` computes at once it computes in the memory of one row, or of
    a batch of rows.

    Args:
        f: a function of `xs[t]`, row `t` of each tensor in `xs`.
        xs: a pytree of tensors.
        batch_size: how many rows are computed at once, by `vmap`; the last ones may be fewer. None for one, without it.

    Returns:
        The pytree of stacked results.

    Raises:
        TraceError: tensors have different numbers of rows, or none has rows; the size is not positive.

    >>> import torch
    >>> map(lambda x: x.square().sum(), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), batch_size=2)
    tensor([ 5., 25., 61.])
    """
    check_callable(_CALL, [("f", f)])
    if batch_size is None:
        return _each(f, xs)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise TraceError(f"{_CALL} at {where()}: batch_size must be an integer of 1 or more (got {batch_size!r:.60}).")
    count = number_of_rows(leaves_of(xs, _CALL, "xs"), None, _CALL)
    whole = count - count % batch_size
    parts = []
    if whole or not count:
        shape = (whole // batch_size, batch_size)
        blocks = tree_map(lambda x: x[:whole].unflatten(0, shape), xs)
        parts.append(tree_map(lambda y: y.flatten(0, 1), _each(lambda block: _batch(f, block), blocks)))
    if whole < count:
        parts.append(_batch(f, tree_map(lambda x: x[whole:], xs)))
    return tree_map(lambda *rows: torch.cat(rows), *parts) if len(parts) > 1 else parts[0]


def _each(f: Callable[[Any], _Result], xs: Any) -> _Result:
    """The stacked results of a function of each row."""
    results: _Result = loop(_CALL, "f", lambda _, x: (None, f(x)), None, xs)[1]
    return results


def _batch(f: Callable[[Any], Any], xs: Any) -> Any:
    """The stacked results of a function of each row, of all rows at once."""
    rows, structure = tree_flatten(xs)
    results = Results(_CALL, device_of(xs))

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(results.tensors(f(structure.unflatten(tensors)), "f"))

    return results.tree(torch.func.vmap(flat, randomness="different")(*rows))
