"""In-place writes through `expand`, `as_strided` and `unfold` views, whose elements may share memory.

Functionalization inverts a view to update its base after a write. For a view that repeats elements that inverse is a
sum over the repetitions, which is not what a write means; for `as_strided` of a view there is no inverse. So these
views are recorded together with the tensor that they are views of, and a write through one, or through a view of one,
becomes a scatter into that tensor. torch raises for most writes to elements that share memory, or leaves their order
undefined; writing a single number is well defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from spmd.errors import TraceError
from spmd.ir.graph import iterate_leaves
from spmd.ir.operator_kinds import FILLS_IN_PLACE
from spmd.tracing.as_strided import overlaps
from spmd.tracing.source import where

OpOverload = torch._ops.OpOverload
aten = torch.ops.aten

_STRIDED = frozenset({aten.as_strided.default, aten.unfold.default})
"""Views that functionalization inverts wrongly; its inverse of `unfold` loses the elements between the windows."""

_FILLS = (FILLS_IN_PLACE - {aten.fill_.Tensor}) | {  # torch refuses that one
    aten.masked_fill_.Scalar, aten.index_fill_.int_Scalar, aten.tril_.default, aten.triu_.default,
}  # fmt: skip
"""Writes of one number: memory that several elements share gets it if the write selects any of them."""


class OverlappingViews:
    """The views in a trace that repeat elements or are made by `_STRIDED` operators, and the views of those."""

    def __init__(self) -> None:
        # Keyed by id: each entry keeps its tensor alive, so that Python does not reuse the id.
        self._sources: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(self, func: OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """Record the results of a call if they are such views."""
        known = self._sources.get(id(args[0])) if args else None
        starts = func in _STRIDED or (func is aten.expand.default and repeats_memory(result))
        if not starts and not (known and func.is_view):
            return
        root = known[1] if known else args[0]
        for leaf in iterate_leaves(result):
            self._sources[id(leaf)] = leaf, root

    def write(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Apply an in-place operator to such a view, as a scatter into the tensor that it is a view of.

        Returns:
            The view; None, with nothing done, if the operator writes to no such view.

        Raises:
            TraceError: the operator writes different values to elements that share memory, or to several tensors.
        """
        targets = list(_written(func, args, kwargs))
        known = [target for _, target in targets if id(target) in self._sources or repeats_memory(target)]
        if not known:
            return None
        if len(targets) > 1:
            raise _refusal(func, known[0])
        ((name, target),) = targets
        repeated = [dim for dim in range(target.ndim) if target.stride(dim) == 0 and target.shape[dim] > 1]
        once = _first(target, repeated)
        if repeats_memory(once) or (repeated and func not in _FILLS):
            raise _refusal(func, target)
        written = target.clone(memory_format=torch.contiguous_format)
        _call(func, args, kwargs, name, written)
        source, geometry = self._sources[id(target)][1], (once.shape, once.stride(), once.storage_offset())
        source.copy_(source.as_strided_scatter(_joined(target, written, repeated), *geometry))
        return target


def _refusal(func: OpOverload, target: torch.Tensor) -> TraceError:
    return TraceError(
        f"{func} at {where()} writes in place to a tensor of shape {list(target.shape)} of which several elements "
        "share one place in memory (expand, unfold and as_strided make such views), or to several tensors of which one "
        "is such a view. Write to a copy: x.clone()."
    )


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a call writes to, each with the name of the operator's argument."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            leaves = iterate_leaves(given.get(argument.name))
            yield from ((argument.name, leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, value: Any) -> None:
    """Call an operator with the argument `name` replaced by `value`."""
    names = [argument.name for argument in func._schema.arguments]  # type: ignore[attr-defined]
    swap = lambda argument: [value] if isinstance(argument, (list, tuple)) else value  # noqa: E731
    positional = [swap(argument) if names[index] == name else argument for index, argument in enumerate(args)]
    func(*positional, **{key: swap(argument) if key == name else argument for key, argument in kwargs.items()})


def repeats_memory(x: torch.Tensor) -> bool:
    """Whether elements share memory: a stride of 0 repeats them; none do if each stride exceeds the dims inside it."""
    if x.numel() < 2:
        return False
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride == 0:
            return True
        if stride <= reach:
            return overlaps(x)
        reach += stride * (size - 1)
    return False


def _first(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The first element along each of some dims, which remain as dims of length 1."""
    for dim in dims:
        x = x.narrow(dim, 0, 1)
    return x


def _joined(before: torch.Tensor, after: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The elements after a write of one number to a tensor that repeats them along `dims`; these get length 1.

    Where any of the elements that share memory has changed, the result is the changed one.
    """
    if not dims:
        return after
    changed = (after != before) & ((after == after) | (before == before))  # NaN before and after is no change
    for dim in dims:
        place = changed.to(torch.uint8).argmax(dim, keepdim=True)
        after, changed = after.gather(dim, place), changed.gather(dim, place)
    return after
