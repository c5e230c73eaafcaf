"""In-place writes through views that hold one place of memory several times, as `expand` makes them, or any place.

Functionalization undoes a view to find what was written to its base. The inverse of a view that repeats elements is a
sum over them, not what a write means, and of `as_strided` of a view there is none. So these views are remembered, with
the tensor that they are of, and a write through them, or through a view of them, is a scatter into that tensor. torch
refuses most writes to elements that share a place, or leaves their order open; filling them with a number is well
defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from spmd.as_strided import overlaps
from spmd.errors import TraceError
from spmd.graph import iterate_leaves
from spmd.recorder import where

OpOverload = torch._ops.OpOverload
aten = torch.ops.aten

_REPEATING = frozenset({aten.expand.default, aten.unfold.default})
_FILLS = frozenset({aten.fill_.Scalar, aten.zero_.default})


class RepeatedViews:
    """The views of a trace that repeat elements, those by `as_strided`, and the views of those."""

    def __init__(self) -> None:
        # Tensors are known by identity, so each must stay alive as long as its id is in the table.
        self._sources: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(self, func: OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """Remember the results of a call that are such views."""
        known = self._sources.get(id(args[0])) if args else None
        starts = func is aten.as_strided.default or (func in _REPEATING and _repeats_memory(result))
        if not starts and not (known and func.is_view):
            return
        root = known[1] if known else args[0]
        for leaf in iterate_leaves(result):
            self._sources[id(leaf)] = leaf, root

    def write(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Do what an in-place operator does to such a view, as a scatter; False if it writes to none.

        Raises:
            TraceError: it would write to elements that share a place in memory.
        """
        found = False
        for name, target in _written(func, args, kwargs):
            if id(target) not in self._sources and not _repeats_memory(target):
                continue
            once = _without_repeats(target)
            if _repeats_memory(once) or (once is not target and func not in _FILLS):
                raise TraceError(
                    f"{func} at {where()} writes in place to a tensor of shape {list(target.shape)} of which several "
                    "elements share one place in memory (expand, unfold and as_strided make such views). Write to a "
                    "copy: x.clone()."
                )
            source = self._sources[id(target)][1]
            written = once.clone()
            _call(func, args, kwargs, name, written)
            geometry = once.shape, once.stride(), once.storage_offset()
            source.copy_(source.as_strided_scatter(written, *geometry))
            found = True
        return found


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that an operator writes to, by the names of its arguments."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    for argument in func._schema.arguments:
        target = given.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(target, torch.Tensor):
            yield argument.name, target


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, value: Any) -> None:
    """Call an operator with another value for one argument."""
    names = [argument.name for argument in func._schema.arguments]  # type: ignore[attr-defined]
    positional = [value if names[index] == name else argument for index, argument in enumerate(args)]
    func(*positional, **{key: value if key == name else argument for key, argument in kwargs.items()})


def _repeats_memory(x: torch.Tensor) -> bool:
    """Whether elements share memory; where each dim steps over those inside it, none do."""
    if x.numel() < 2:
        return False
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride <= reach:
            return overlaps(x)
        reach += stride * (size - 1)
    return False


def _without_repeats(x: torch.Tensor) -> torch.Tensor:
    """The tensor without the dims along which it repeats; itself if there are none."""
    for dim in reversed(range(x.ndim)):
        if x.stride(dim) == 0 and x.shape[dim] > 1:
            x = x.select(dim, 0)
    return x
