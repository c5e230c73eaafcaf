"""`associative_scan`: all partial results of an associative operation, in a logarithmic number of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from spmd.api.control_flow.leaves import Leaves, check_callable, device_of, difference, leaves_of
from spmd.api.control_flow.new_values import new_values
from spmd.api.control_flow.unwritten import called
from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.job.tracebacks import hides_internals_of_own_errors
from spmd.tracing.source import where

_CALL = "spmd.associative_scan"
_Elems = TypeVar("_Elems")


@hides_internals_of_own_errors
def associative_scan(
    fn: Callable[[_Elems, _Elems], _Elems], elems: _Elems, reverse: bool = False, dim: int = 0
) -> _Elems:
    """Combine each row with all rows before it; `jax.lax.associative_scan`.

    Row `t` of the result is `fn(... fn(fn(row 0, row 1), row 2) ..., row t)`, computed by about `2 log2(n)` calls of
    `fn`, each of which combines many pairs at once. The calls are ordinary operators, in a function under `jit` too.

    Args:
        fn: combines two pytrees like `elems`, row by row along `dim`. It must be associative.
        elems: a pytree of tensors of one length in `dim`.
        reverse: whether each row is combined with all rows behind it.
        dim: the dim along which rows are counted, negative ones from the end.

    Returns:
        A pytree like `elems`.

    Raises:
        TraceError: the lengths differ; `fn` does not return a tree like `elems`, with the shapes and dtypes it gets.

    >>> import torch
    >>> associative_scan(torch.mul, torch.tensor([1, 2, 3, 4]))
    tensor([ 1,  2,  6, 24])
    """
    check_callable(_CALL, [("fn", fn)])
    found = leaves_of(elems, _CALL, "elems")
    tensors = found.tensors(None)
    dim = _dim(found.paths, tensors, dim)

    def combine(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        return _checked(found, called(fn, *map(found.structure.unflatten, (a, b)), call=_CALL, name="fn"), a)

    if reverse:
        tensors = [x.flip(dim) for x in tensors]
    scanned = _scan(combine, tensors, dim)
    scanned = new_values([x.flip(dim) for x in scanned] if reverse else scanned, tensors)
    result: _Elems = found.structure.unflatten(scanned)
    return result


def _scan(combine: Callable[..., list[Tensor]], elems: list[Tensor], dim: int) -> list[Tensor]:
    """The scan of pairs of neighbours is that of the odd rows; one more combination each makes the even ones."""
    count = elems[0].shape[dim]
    if count < 2:
        return elems

    def rows(tensors: Sequence[Tensor], start: int, stop: int | None, step: int) -> list[Tensor]:
        return [x[(slice(None),) * dim + (slice(start, stop, step),)] for x in tensors]

    odd = _scan(combine, combine(rows(elems, 0, count - 1, 2), rows(elems, 1, None, 2)), dim)
    later = combine(rows(odd, 0, (count - 1) // 2, 1), rows(elems, 2, None, 2)) if count > 2 else rows(elems, 0, 0, 1)
    even = [torch.cat(parts, dim) for parts in zip(rows(elems, 0, 1, 1), later, strict=True)]
    pairs = zip(even, rows(even, count // 2, None, 1), odd, strict=True)
    return [
        torch.cat([torch.stack([x.narrow(dim, 0, count // 2), y], dim + 1).flatten(dim, dim + 1), last], dim)
        for x, last, y in pairs
    ]


def _dim(paths: Sequence[str], tensors: Sequence[Tensor], dim: Any) -> int:
    """The dim of rows, counted from the first one.

    Raises:
        TraceError: it is none of a tensor, or its lengths differ.
    """
    call = f"{_CALL} at {where()}"
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TraceError(f"{call}: dim must be an integer (got {dim!r:.60}).")
    if not tensors:
        raise TraceError(f"{call}: elems has no tensor.")
    first = dim + tensors[0].ndim if dim < 0 else dim
    for path, x in zip(paths, tensors, strict=True):
        if not 0 <= first < x.ndim:
            raise TraceError(f"{call}: elems{path} {TensorMeta.of(x)} has no dim {dim}.")
    lengths = {x.shape[first] for x in tensors}
    if len(lengths) > 1:
        shown = ", ".join(f"elems{path} has {x.shape[first]}" for path, x in zip(paths, tensors, strict=True))
        raise TraceError(f"{call}: all elems must have the same number of rows in dim {dim} (got: {shown}).")
    return first


def _checked(elems: Leaves, tree: Any, like: Sequence[Tensor]) -> list[Tensor]:
    """What `fn` returns, as a list.

    Raises:
        TraceError: it is not like what `fn` gets.
    """
    result = leaves_of(tree, _CALL, "the result of fn")
    gets = Leaves(tuple(like), elems.structure).metas(None)
    device = device_of(like)
    found = difference(result.metas(device), gets)
    if found is not None:
        raise TraceError(
            f"{_CALL} at {where()}: fn returns {found[0]}, where it gets two of {found[1]}. It must return what it "
            "gets: many rows at once, of the same shapes and dtypes."
        )
    return result.tensors(device)
