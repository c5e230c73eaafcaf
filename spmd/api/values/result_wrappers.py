"""The DTensors of the results of a program: new ones, or those that were donated to it and dropped since."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any

import torch

from spmd.api.values.dtensor import DTensor, wrap
from spmd.api.values.wrapper import Shards, replace_shards, set_maker
from spmd.core.spec import DTensorSpec
from spmd.runtime.ownership import LISTED, have_references

_any_requires_grad = torch._C._any_requires_grad  # type: ignore[attr-defined]
_is_inference = torch.is_inference_mode_enabled
_maker = attrgetter("_maker")


class ResultWrappers:
    """Makes the DTensors of a program's results.

    A training loop donates its state and drops it. The DTensors that it was in have no shards then, and nobody sees
    them: they get the shards of the results of the next call, because a new DTensor takes three times as long.

    Args:
        specs: the specs of the results.
        given: the specs of the arguments.
        donated: the numbers of the donated arguments.
    """

    def __init__(self, specs: Sequence[DTensorSpec], given: Sequence[DTensorSpec], donated: Collection[int]) -> None:
        waiting: dict[DTensorSpec, list[int]] = defaultdict(list)
        for number in sorted(donated, reverse=True):
            waiting[given[number]].append(number)
        self._specs = specs
        sources = [waiting[spec].pop() if waiting[spec] else None for spec in specs]  # the argument for each result
        self._fresh = [number for number, source in enumerate(sources) if source is None]
        self._kept = [source for source in sources if source is not None]
        self._spares: deque[list[Any]] = deque(maxlen=1)

    def wrap(self, results: Sequence[Shards]) -> list[DTensor]:
        """The DTensors of the shards of the results."""
        if _is_inference():
            return list(map(wrap, self._specs, results))
        try:
            values = self._spares.pop()  # by one thread only
        except IndexError:
            values = []
        if not self._are_as_made(values):
            values = list(map(wrap, self._specs, results))
            deque(map(set_maker, values, [self] * len(values)), maxlen=0)
            return values
        for number in self._fresh:
            value = wrap(self._specs[number], results[number])
            set_maker(value, self)
            values.insert(number, value)
        deque(map(replace_shards, values, results), maxlen=0)
        return values

    def keep(self, leaves: Sequence[Any]) -> None:
        """Keep the donated ones among the arguments of a call; they have lost their shards."""
        spares = list(map(leaves.__getitem__, self._kept))
        if torch.is_grad_enabled() or not _any_requires_grad(*spares):  # else the call has checked that none does
            self._spares.append(spares)

    def _are_as_made(self, values: list[Any]) -> bool:
        """Whether DTensors are what `wrap` has made, but without shards, and only this list holds them."""
        try:
            makers = {*map(_maker, values)}
        except AttributeError:
            return False
        return makers == {self} and have_references(values, LISTED) and not any(map(weakref.getweakrefcount, values))
