"""Effects: what an operation does beside computing its results, so that it runs as often and in the order as written.

No pass removes, repeats, merges or reorders operations with effects, and all ranks run the same ones in the same order.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.ir.random_operators import is_random


class Effect(enum.Enum):
    """The kind of an effect."""

    RANDOM = "random"
    """It draws from the random number generator, which all ranks advance together."""
    COLLECTIVE = "collective"
    """It communicates with other ranks, which wait for each other."""
    HOST = "host"
    """It acts on the host process, on every rank by itself, and computes nothing: it prints or checks, for example."""
    ORDERED = "ordered"
    """It acts on the host process, on every rank by itself, and computes results as other operators do."""
    REGION = "region"
    """It begins, divides or ends a loop or a branch."""


_DECLARED: dict[Any, Effect] = {}


def declare_effect(op: Any, effect: Effect) -> None:
    """Declare that every call of an operator has an effect; random operators are known without it."""
    _DECLARED[op] = effect


def effect_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effect | None:
    """The effect of a call; None if it only computes results.

    >>> import torch
    >>> effect_of(torch.ops.aten.bernoulli.p, (torch.ones(2), 0.5), {})
    <Effect.RANDOM: 'random'>
    """
    declared = _DECLARED.get(op)
    if declared is None and is_random(op, args, kwargs):
        return Effect.RANDOM
    return declared
