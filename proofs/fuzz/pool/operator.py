"""The operators of the pool: each chooses operands and returns the text of a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from proofs.fuzz.draw import Block, Draw, Operand
from proofs.fuzz.environment import Rejected

Operator: TypeAlias = Callable[[Draw], "str | Block"]
"""Returns an expression for one or more tensors, or statements; raises `Rejected` if there is no suitable operand."""


def unary(text: str, *, nonempty: bool = False) -> Operator:
    """An operator of one float tensor, `x` in the text; `n` stands for a number."""

    def operator(d: Draw) -> str:
        return fill(text, x=d.floats(nonempty=nonempty), n=d.number())

    return operator


def binary(text: str) -> Operator:
    """An operator of a float tensor and one that broadcasts to it, `x` and `y` in the text."""

    def operator(d: Draw) -> str:
        x = d.floats()
        y = d.broadcast(x)
        return fill(text, x=x, y=y, n=d.number())

    return operator


def along(text: str, *, nonempty: bool = True, distinct: bool = False) -> Operator:
    """An operator of a float tensor and one of its dims, `x` and `d` in the text; `k` is a bool.

    Args:
        text: the expression.
        nonempty: whether the tensor must have elements.
        distinct: whether all numbers along the dim must be different.
    """

    def operator(d: Draw) -> str:
        x = d.floats((1, 4), nonempty=nonempty)
        dim = d.dim(x, nonempty=nonempty)
        if distinct:
            d.distinct(x, dim)
        return fill(text, x=x, d=dim, k=d.maybe())

    return operator


def fill(text: str, **parts: object) -> str:
    """The text with each `{name}` replaced."""
    return text.format(**parts)


def chosen(*operators: Operator) -> Operator:
    """An operator that is one of several, chosen at random."""
    return lambda d: d.choice(*operators)(d)


__all__ = ["Block", "Draw", "Operand", "Operator", "Rejected", "along", "binary", "chosen", "fill", "unary"]
