"""Builds blocks of random steps: each step is run by the reference at once, and kept if its values are usable."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from proofs.shard_map_fuzz import letters as types
from proofs.shard_map_fuzz.pool import COSTS
from proofs.shard_map_fuzz.program import Layout, Letters, Step, Transform
from proofs.shard_map_fuzz.reference import Ranks, Values, World, enter


@attrs.define
class Builder:
    """A block that grows by one step at a time.

    Args:
        rng: the source of choices.
        world: runs steps.
        ranks: the manual axes of the block.
        names: makes new names, for the whole program.
        values: the values that the block may use, its own and those that it closes over.
        letters: their types.
        budget: how many more steps may be made, with those of inner blocks.
        level: how many blocks are around this one.
        is_mapped: whether a vmap is around this block.
        own_batches: the axes along which each rank has another batch, of a vmap around this block.
        is_uneven: whether regions may have shards of unequal lengths.
        copied: closed-over tensors that a transform inside must copy first.
    """

    rng: random.Random
    world: World
    ranks: Ranks
    names: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))
    values: Values = attrs.field(factory=dict)
    letters: dict[str, Letters] = attrs.field(factory=dict)
    budget: int = 10
    level: int = 0
    is_mapped: bool = False
    own_batches: frozenset[str] = frozenset()
    is_uneven: bool = False
    copied: frozenset[str] = frozenset()
    steps: list[Step] = attrs.field(factory=list)
    consumed: set[str] = attrs.field(factory=set)

    def fresh(self) -> str:
        """A new name."""
        return f"v{next(self.names)}"

    def inner(self, budget: int, ranks: Ranks | None = None) -> Builder:
        """A builder of a block inside of this one, which can close over its values."""
        return Builder(
            self.rng,
            self.world,
            ranks or self.ranks,
            self.names,
            dict(self.values),
            dict(self.letters),
            budget,
            self.level + 1,
            self.is_mapped,
            self.own_batches,
            self.is_uneven,
            self.copied,
        )

    def add(self, step: Step, found: Sequence[Letters]) -> bool:
        """Run a step and keep it, with the types of what it computes; False if torch or the limits refuse it."""
        values = dict(self.values)
        try:
            self.world.run(step, self.ranks, values)
        except (RuntimeError, IndexError, ValueError):
            return False
        made = [values[name] for name in step.targets]
        if not all(map(is_usable, made)):
            return False
        for name, tensors, letters in zip(step.targets, made, found, strict=True):
            self.values[name], self.letters[name] = [x.detach() for x in tensors], dict(letters)
        self.steps.append(step)
        self.consumed.update(step.operands)
        if isinstance(step, Transform):
            self.consumed.update(step.extra)
        return True

    def force(self, step: Step, found: Letters) -> None:
        """Run a step and keep it."""
        self.world.run(step, self.ranks, self.values)
        (target,) = step.targets
        self.values[target] = [x.detach() for x in self.values[target]]
        self.letters[target] = dict(found)
        self.steps.append(step)
        self.consumed.update(step.operands)

    def enter(self, param: str, tensors: Sequence[Tensor], letters: Letters, layout: Layout) -> None:
        """Make a parameter of a region of a value of the block around it."""
        copies = len(self.ranks.coordinates) // len(tensors)
        self.values[param] = enter([x for x in tensors for _ in range(copies)], layout, self.ranks)
        kinds = dict.fromkeys(self.ranks.axes, "I") | dict.fromkeys(layout.axes, "V")
        self.letters[param] = kinds | dict.fromkeys(layout.partial, "U") | dict(letters)

    def world_size(self, axes: Sequence[str]) -> int:
        """The number of ranks along mesh axes."""
        return math.prod(self.world.mesh[axis] for axis in axes)

    def sample(self, name: str) -> Tensor:
        """The value of a name on the first rank."""
        return self.values[name][0]

    def floats(self) -> list[str]:
        """The names of floating-point values, oldest first."""
        return [name for name, tensors in self.values.items() if tensors[0].is_floating_point()]

    def pick(self, fits: Callable[[str], bool] = lambda name: True, among: Sequence[str] | None = None) -> str | None:
        """A floating-point value that fits: rather one that nothing consumes yet, and rather a late one."""
        found = [name for name in (self.floats() if among is None else among) if fits(name)]
        if not found:
            return None
        weights = [(1 + place) * (1 if name in self.consumed else 6) for place, name in enumerate(found)]
        return self.rng.choices(found, weights)[0]

    def ndim(self, name: str) -> int:
        return self.sample(name).ndim

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.sample(name).shape)

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """The shapes of a value on all ranks."""
        return [tuple(x.shape) for x in self.values[name]]

    def is_equal(self, name: str) -> bool:
        """Whether all ranks hold the same shape."""
        return len(set(self.shapes(name))) == 1

    def differing(self, name: str, axes: Sequence[str] | None = None) -> list[int]:
        """The dims whose lengths differ between ranks, or between those that differ along some axes only."""
        groups = self.ranks.groups(self.ranks.axes if axes is None else axes)
        rows = [[self.values[name][rank].shape for rank in group] for group in groups]
        return [dim for dim in range(self.ndim(name)) if any(len({shape[dim] for shape in row}) > 1 for row in rows)]

    def axes(self) -> tuple[str, ...]:
        """One manual axis, or several in any order."""
        found = list(self.ranks.axes)
        count = 1 if self.rng.random() < 0.75 else self.rng.randint(1, len(found))
        return tuple(self.rng.sample(found, count))

    def is_linear_only(self, name: str) -> bool:
        return types.has_unreduced(self.letters[name])

    def automatic(self) -> list[str]:
        """The mesh axes that are not manual here."""
        return [axis for axis in self.world.mesh if axis not in self.ranks.axes]

    def letter_groups(self, name: str, letter: str) -> tuple[str, ...]:
        """The axes along which a value has a type."""
        return tuple(axis for axis, held in self.letters[name].items() if held == letter)


def is_usable(tensors: Sequence[Tensor]) -> bool:
    """Whether values are few, small and finite, and some rank holds any."""
    held = [x.detach() for x in tensors if x.numel()]
    if not held or any(x.numel() > COSTS["elements"] or x.ndim > 4 for x in tensors):
        return False
    if not held[0].is_floating_point():
        return True
    return all(bool(torch.isfinite(x).all()) and float(x.abs().max()) <= COSTS["largest"] for x in held)


def weighted(rng: random.Random, options: Mapping[Any, float]) -> Any:
    """One of the keys, by weight."""
    return rng.choices(list(options), list(options.values()))[0]
