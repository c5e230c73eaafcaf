"""In-place writes through views that hold one place of memory several times, as `expand` makes them, or any place.

Functionalization undoes a view to find what was written to its base. The inverse of a view that repeats elements is a
sum over them, not what a write means, and of `as_strided` of a view there is none. So these views are remembered, with
the tensor that they are of, and a write through them, or through a view of them, is a scatter into that tensor. torch
refuses most writes to elements that share a place, or leaves their order open; filling them with a number is well
defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from spmd.errors import TraceError
from spmd.ir.graph import iterate_leaves
from spmd.tracing.as_strided import overlaps
from spmd.tracing.recorder import where

OpOverload = torch._ops.OpOverload
aten = torch.ops.aten

_STRIDED = frozenset({aten.as_strided.default, aten.unfold.default})
"""Views of which functionalization has no right inverse; that of `unfold` forgets what lies between the windows."""

_FILLS = frozenset({
    aten.fill_.Scalar, aten.zero_.default, aten.masked_fill_.Scalar, aten.index_fill_.int_Scalar,
    aten.tril_.default, aten.triu_.default,
})  # fmt: skip
"""Writes of one number: where elements share a place, it is written if it is for any of them."""


class RepeatedViews:
    """The views of a trace that repeat elements, those by `as_strided`, and the views of those."""

    def __init__(self) -> None:
        # Tensors are known by identity, so each must stay alive as long as its id is in the table.
        self._sources: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(self, func: OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """Remember the results of a call that are such views."""
        known = self._sources.get(id(args[0])) if args else None
        starts = func in _STRIDED or (func is aten.expand.default and _repeats_memory(result))
        if not starts and not (known and func.is_view):
            return
        root = known[1] if known else args[0]
        for leaf in iterate_leaves(result):
            self._sources[id(leaf)] = leaf, root

    def write(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Do what an in-place operator does to such a view, as a scatter.

        Returns:
            The view; None if the operator writes to none, and nothing is done.

        Raises:
            TraceError: it would write to elements that share a place in memory.
        """
        targets = list(_written(func, args, kwargs))
        known = [target for _, target in targets if id(target) in self._sources or _repeats_memory(target)]
        if not known:
            return None
        if len(targets) > 1:
            raise _refusal(func, known[0])
        ((name, target),) = targets
        repeated = [dim for dim in range(target.ndim) if target.stride(dim) == 0 and target.shape[dim] > 1]
        once = _first(target, repeated)
        if _repeats_memory(once) or (repeated and func not in _FILLS):
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
    """The tensors that an operator writes to, by the names of its arguments."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            leaves = iterate_leaves(given.get(argument.name))
            yield from ((argument.name, leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, value: Any) -> None:
    """Call an operator with another value for one argument."""
    names = [argument.name for argument in func._schema.arguments]  # type: ignore[attr-defined]
    swap = lambda argument: [value] if isinstance(argument, (list, tuple)) else value  # noqa: E731
    positional = [swap(argument) if names[index] == name else argument for index, argument in enumerate(args)]
    func(*positional, **{key: swap(argument) if key == name else argument for key, argument in kwargs.items()})


def _repeats_memory(x: torch.Tensor) -> bool:
    """Whether elements share memory: along a stride of 0 they do; where each dim steps over those inside, none do."""
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
    """The first element along each of some dims, which stay."""
    for dim in dims:
        x = x.narrow(dim, 0, 1)
    return x


def _joined(before: torch.Tensor, after: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """What is in each place after a write of one number to elements that share places along some dims."""
    if not dims:
        return after
    changed = (after != before) & ((after == after) | (before == before))  # a NaN that stays has not changed
    for dim in dims:
        place = changed.to(torch.uint8).argmax(dim, keepdim=True)
        after, changed = after.gather(dim, place), changed.gather(dim, place)
    return after
