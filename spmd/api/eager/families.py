"""Values that share memory on one device: a DTensor, its aliases (`detach`), and views of it.

Shards are never written to: an operator that writes to a DTensor gives it, and its aliases, other shards. A write to a
view is a write to the tensor that it is a view of. Any other view taken before then has the old elements, where
torch's has the new ones, so reading it is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias

import attrs
import torch

from spmd.api.values.dtensor import DTensor, set_family
from spmd.api.values.wrapper import Shards, lose_shards, replace_shards
from spmd.tracing.source import where

Step: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""An operator that makes a view; equal ones make the same view."""


@attrs.define(eq=False)
class View:
    """What a view is a view of.

    Args:
        base: the DTensor, which is no view itself.
        steps: the operators from it to the view.
    """

    base: DTensor
    steps: tuple[Step, ...]

    def overlaps(self, view: DTensor) -> bool:
        """Whether elements of the view share one place in memory; torch does not write to such views."""
        return view.numel() > self.base.numel()


class _References:
    """DTensors, as long as they are referenced elsewhere."""

    __slots__ = ("_limit", "_members")

    def __init__(self) -> None:
        self._members: list[weakref.ref[DTensor]] = []
        self._limit = 16

    def add(self, value: DTensor) -> None:
        """Add a DTensor; those that are gone are forgotten when there are twice as many as there were alive."""
        if len(self._members) == self._limit:
            self._members = [member for member in self._members if member() is not None]
            self._limit = 16 + 2 * len(self._members)
        self._members.append(weakref.ref(value))

    def __iter__(self) -> Iterator[DTensor]:
        return (value for value in (member() for member in self._members) if value is not None)


class Family:
    """The aliases of one DTensor, and the views of it, as long as they are referenced."""

    __slots__ = ("aliases", "views")

    def __init__(self) -> None:
        self.aliases, self.views = _References(), _References()


def add_alias(value: DTensor, alias: DTensor) -> None:
    """Make a new DTensor an alias of another."""
    held = value._family
    if isinstance(held, View):
        _add_view(alias, held)
    else:
        _family(value).aliases.add(alias)
        set_family(alias, value._family)


def add_view(value: DTensor, view: DTensor, step: Step) -> None:
    """Make a new DTensor a view of another, by an operator `step`."""
    held = value._family
    _add_view(view, View(held.base, (*held.steps, step)) if isinstance(held, View) else View(value, (step,)))


def view_of(value: DTensor) -> View | None:
    """What a DTensor is a view of; None if it is no view."""
    held = value._family
    return held if isinstance(held, View) else None


def write(value: DTensor, shards: Shards, *, through: bool = False) -> None:
    """Give a DTensor other shards, and what shares its memory.

    Its aliases get the same shards; if it is a view, the views by the same operators. Views of it cannot be read any
    more.

    Args:
        value: the DTensor.
        shards: its new shards.
        through: whether it is a view whose base was written to before; else a view is a tensor of its own from then on.
    """
    held: Family | View | None = value._family
    if held is None:
        replace_shards(value, shards)
    elif isinstance(held, Family):
        for alias in held.aliases:
            if alias._family is held:  # and not given other data since
                replace_shards(alias, shards)
        for view in held.views:
            lose_shards([view], _stale())
    elif not through:
        replace_shards(value, shards)
        set_family(value, None)
    else:
        for view in _family(held.base).views:
            if isinstance(view._family, View) and view._family.steps == held.steps:
                replace_shards(view, shards)


def _stale() -> tuple[str, str]:
    return "a view from before a write", (
        f"the tensor that it is a view of was written to, at {where()}. Take the view again."
    )


def _family(value: DTensor) -> Family:
    """The family of a DTensor that is no view; one that has none starts one."""
    family: Family | None = value._family
    if family is None:
        family = Family()
        family.aliases.add(value)
        set_family(value, family)
    return family


def _add_view(value: DTensor, view: View) -> None:
    _family(view.base).views.add(value)
    set_family(value, view)
