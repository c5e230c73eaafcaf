"""The values of a program during generation, computed twice: the second time from inputs with changed last digits."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from proofs.fuzz.rounding import OtherRounding
from proofs.fuzz.tensors import Recipe, agrees, in_order, nudged
from spmd.core.spec import P
from spmd.tracing.running import is_tracing

LARGEST = 4096
"""The most elements of a value."""

SEED = 11
"""The seed of torch's default generator when a program runs."""

_FAR = 1e4  # the largest number that a value may hold
_STABLE = 1e-6  # how far results may change when inputs change by NUDGE: rounding grows at most ten thousand times


class Rejected(Exception):
    """A line that cannot be part of a program: torch refuses it, or rounding alone would change what it computes."""


def names() -> dict[str, Any]:
    """The names that the text of a program may refer to."""
    return {
        "functools": functools,
        "torch": torch,
        "F": F,
        "spmd": sys.modules["spmd"],
        "P": P,
        "is_tracing": is_tracing,
        "g": torch.Generator(),
    }


def seeded(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function after torch's default generator is seeded with `SEED`."""
    torch.manual_seed(SEED)
    return function(*args)


class Environment:
    """The values of a program by name, computed line by line."""

    def __init__(self) -> None:
        self.values, self._moved = names(), names()
        self._done: list[tuple[str, Recipe | str]] = []

    def define(self, name: str, recipe: Recipe, *, argument: bool) -> None:
        """Add a tensor; an argument is made contiguous, as in a jitted function."""
        value = eval(recipe.text(), self.values)
        moved = nudged(value)
        self.values[name] = in_order(value) if argument else value
        self._moved[name] = in_order(moved) if argument else moved
        self._done.append((name, (recipe, argument)))  # type: ignore[arg-type]

    def evaluate(self, expression: str) -> Any:
        """The values of an expression from the original and from the changed inputs.

        Raises:
            Rejected: torch refuses it, or rounding would change it.
        """
        try:
            value = seeded(eval, expression, self.values)
            with OtherRounding():
                moved = seeded(eval, expression, self._moved)
        except Exception as error:
            raise Rejected(f"{expression}: {error}") from None
        check_stable(value, moved)
        return value, moved

    def bind(self, name: str, value: Any, moved: Any) -> None:
        """Bind a name to the two values of an expression."""
        self.values[name], self._moved[name] = value, moved

    def run(self, statements: str) -> None:
        """Execute statements, which may write to values.

        Raises:
            Rejected: as `evaluate`; values may then have been written to.
        """
        try:
            seeded(exec, statements, self.values)
            with OtherRounding():
                seeded(exec, statements, self._moved)
        except Exception as error:
            raise Rejected(f"{statements}: {error}") from None

    def check(self, names: Mapping[str, Any] | list[str]) -> None:
        """Check values that statements may have written to.

        Raises:
            Rejected: rounding would change one of them.
        """
        for name in names:
            check_stable(self.values[name], self._moved[name])


def check_stable(value: Any, moved: Any) -> None:
    """Check two results that were computed from inputs which differ in the last digits.

    Raises:
        Rejected: the results differ in more than the last digits, are large, or are not tensors.
    """
    values = value if isinstance(value, (tuple, list)) else (value,)
    others = moved if isinstance(moved, (tuple, list)) else (moved,)
    if len(values) != len(others):
        raise Rejected("another number of results")
    for one, other in zip(values, others, strict=True):
        if not isinstance(one, torch.Tensor) or one.numel() > LARGEST or one.layout is not torch.strided:
            raise Rejected(f"no small tensor: {type(one).__name__} {getattr(one, 'shape', '')}")
        if one.is_floating_point() or one.is_complex():
            if one.numel() and not one.abs().max().item() < _FAR:
                raise Rejected("large or not finite")
        elif one.dtype != torch.bool and one.numel() and one.dtype.is_signed and one.abs().max().item() > _FAR:
            raise Rejected("large")
        if not agrees(other, one, _STABLE):
            raise Rejected("rounding would change it")
