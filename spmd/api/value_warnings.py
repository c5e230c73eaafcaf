"""Warnings about values for which a jitted function is compiled again and again, and about missing gradients."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Protocol

from spmd.api.signature import Signature
from spmd.core.spec import TensorMeta
from spmd.ir.source import Source
from spmd.tracing.numbers import Guard
from spmd.tracing.source import user_source, warn_at


class Guarded(Protocol):
    """A program that holds for some values of numbers only."""

    @property
    def is_traced(self) -> bool: ...

    def failing(self, numbers: Sequence[float]) -> Guard | None:
        """The first guard that does not hold for the dynamic numbers of a call."""


MANY = 8
"""The number of values of an int for which a function is compiled without a warning."""

ANEW = 3
"""The recompilations for one thing that a function reads before there is a warning."""


class ValueWarnings:
    """What one jitted function has warned of: once for each line that needs a value, and for each int."""

    def __init__(self) -> None:
        self._lines: set[Source | None] = set()
        self._ints: dict[str, set[int]] = {}
        self._changes: collections.Counter[str] = collections.Counter()

    def of_new(self, name: str, signature: Signature, numbers: Sequence[float], others: Iterable[Guarded]) -> None:
        """Warn of what makes a new program necessary.

        Args:
            name: the function.
            signature: that of the program.
            numbers: the dynamic numbers of the call.
            others: the programs of this signature that do not hold for them.
        """
        for program in others:
            guard = program.failing(numbers) if program.is_traced else None
            if guard is not None and guard.source not in self._lines:
                self._lines.add(guard.source)
                warn_at(
                    f"Python needs the value of {guard.number} here (`if`, float(), math, ...): {name} is compiled for "
                    f"{guard.value}, and now for {guard.number.evaluate(numbers)}. Each outcome is a program of its "
                    "own. Compute with tensors (torch.where instead of `if`), or compute it outside and pass the "
                    "result.",
                    guard.source,
                )
        for path, value in signature.ints:
            seen = self._ints.setdefault(path, set())
            seen.add(value)
            if len(seen) == MANY + 1:
                warn_at(
                    f"Argument {path} of {name} is an int, and this is its value number {len(seen)}: {value}. "
                    "Ints are static, so each value is a program of its own. Pass a float or a tensor: "
                    f"float({value}) or torch.tensor({value}).",
                    user_source(),
                )

    def of_change(self, name: str, label: str, change: str) -> None:
        """Warn, once, of what a function reads beside its arguments and is compiled again for the third time.

        Args:
            name: the function.
            label: what it reads.
            change: how that has changed, in words.
        """
        self._changes[label] += 1
        if self._changes[label] == ANEW:
            warn_at(
                f"{name} is compiled again for the third time, as {change}. What a function reads beside its arguments "
                f"is part of the program, so each value is a program of its own. Pass {label} as an argument.",
                user_source(),
            )


def warn_of_transforms(name: str, values: int) -> None:
    """Warn if transforms from outside, whose programs are each for one value of every number, see many values."""
    if values == MANY + 1:
        warn_at(
            f"A transform from outside acts on {name}, and this is the {values}th value of its numbers: each is "
            "a program of its own there. Pass them as tensors, or put spmd.jit outside of the transform.",
            user_source(),
        )


def warn_of_missing_gradients(name: str, constants: Sequence[TensorMeta]) -> None:
    """Warn that a function that is differentiated closes over tensors that require grad."""
    warn_at(
        f"{name} is differentiated, and closes over {len(constants)} tensors that require grad, such as one "
        f"{constants[0]}: they are constants of the program, and get no gradient. Pass what has them as an argument, "
        "as spmd.jit(lambda model, x: model(x)); or set requires_grad_(False).",
        user_source(),
    )
