"""Writes a program statement by statement."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping

import attrs
import torch

from proofs.fuzz.draw import Block, Draw, Operand
from proofs.fuzz.environment import Environment, Rejected
from proofs.fuzz.pool import LOOPS, OPERATORS, WEIGHTS
from proofs.fuzz.program import Line

NAMES = tuple(OPERATORS)
CHANCES = tuple(WEIGHTS[name] for name in NAMES)
TRIES = 4  # attempts with one operator, so that operators with many conditions are not rare
_DEPTH = 2  # of loops and branches in each other
_NESTED = 0.2  # the probability that a statement of a body is a loop or a branch


@attrs.define
class Maker:
    """A program that grows line by line, or a body in one.

    Args:
        draw: the source of choices, and the values so far.
        outer: what a body stands in.
        given: the parameters of a body, as statements that define them as in its first run.
    """

    draw: Draw
    outer: Maker | None = None
    given: str = ""
    lines: list[Line] = attrs.field(factory=list)
    adapted: int = 0

    def __attrs_post_init__(self) -> None:
        self.draw.body = self.body

    def attempt(self, operator: str) -> bool:
        """Add a line of an operator, and return True; False if it has no operands or its result is rejected."""
        draw = self.draw
        before = (dict(draw.arguments), dict(draw.constants), list(draw.values))
        draw.taken, draw.adapters = set(), []
        written = False
        try:
            made = (OPERATORS.get(operator) or LOOPS[operator])(draw)
            written = isinstance(made, Block)
            text, names = self._executed(operator, made) if isinstance(made, Block) else self._evaluated(made)
        except Rejected:
            draw.arguments, draw.constants, draw.values = before
            if written:
                self._rebuild()
            return False
        self.lines += [Line("adapt", text) for _, text in draw.adapters]
        self.adapted += len(draw.adapters)
        self.lines.append(Line(operator, text))
        draw.unused -= {*draw.taken, *words(text)}
        draw.unused |= set(names)
        draw.values += [name for name in names if name not in draw.values]
        return True

    def _executed(self, operator: str, block: Block) -> tuple[str, tuple[str, ...]]:
        environment = self.draw.environment
        text = "\n".join(block.statements)
        environment.run(text)
        for name in block.names if operator in LOOPS else ():
            if not self.draw.is_own(
                Operand(name, environment.values[name]), {*self.draw.values, *block.names} - {name}
            ):
                text += f"\n{name} = {name}.clone()"  # on one device it is what the loop was given, memory and all
                environment.run(f"{name} = {name}.clone()")
        environment.check([*self.draw.values, *block.names])
        return text, block.names

    def _evaluated(self, expression: str) -> tuple[str, tuple[str, ...]]:
        draw = self.draw
        value, moved = draw.environment.evaluate(expression)
        if isinstance(value, torch.Tensor):
            name = draw.name()
            suffix = _relayout(draw, value)
            if suffix:
                text = f"{expression}{suffix}" if _is_postfix(expression) else f"({expression}){suffix}"
                value, moved = draw.environment.evaluate(text)
                expression = text
            draw.environment.bind(name, value, moved)
            return f"{name} = {expression}", (name,)
        kept = [draw.name() for _ in value[:3]]
        for name, one, other in zip(kept, value, moved, strict=False):
            draw.environment.bind(name, one, other)
        targets = ", ".join(kept) + ("," if len(kept) == 1 else "") + (", *_" if len(value) > 3 else "")
        return f"{targets} = {expression}", tuple(kept)

    def _rebuild(self) -> None:
        """Recompute the environment, after rejected statements wrote to its values."""
        draw = self.draw
        if self.outer:
            self.outer._rebuild()
            draw.environment.run(self.given)
        else:
            draw.environment = Environment()
            for table, argument in ((draw.arguments, True), (draw.constants, False)):
                for name, recipe in table.items():
                    draw.environment.define(name, recipe, argument=argument)
        for line in self.lines:
            draw.environment.run(line.text)

    @contextlib.contextmanager
    def body(self, given: Mapping[str, str]) -> Iterator[list[str]]:
        """A context in which operands are those of a body, and the body's random statements.

        Args:
            given: from the name of a parameter, the expression of its value in the first run.
        """
        draw = self.draw
        before = draw.values, draw.unused, draw.taken, draw.adapters, draw.foreign
        inner = Maker(draw, self, "\n".join(f"{name} = {text}" for name, text in given.items()))
        draw.values, draw.unused = [*draw.values, *given], set(given)
        draw.foreign = tuple(draw.values)
        draw.depth += 1
        try:
            draw.environment.run(inner.given)
            draw.environment.check(list(given))
            for _ in range(draw.integer(1, 3)):
                loops = draw.depth < _DEPTH and draw.maybe(_NESTED)
                operator = draw.choice(*LOOPS) if loops else draw.rng.choices(NAMES, CHANCES)[0]
                any(inner.attempt(operator) for _ in range(TRIES))
            draw.taken, draw.adapters, statements = set(), [], [line.text for line in inner.lines]
            yield statements
            statements += [text for _, text in draw.adapters]
        finally:
            draw.depth -= 1
            draw.values, draw.unused, draw.taken, draw.adapters, draw.foreign = before
            draw.body = self.body


def words(text: str) -> list[str]:
    """The names of arguments, constants and values in a text."""
    return re.findall(r"[a-z]\d+", text)


def _relayout(draw: Draw, value: torch.Tensor) -> str:
    """A view to append to an expression, or nothing, so that many values are not contiguous."""
    if value.ndim < 1 or not value.is_contiguous() or draw.maybe(0.55) or value.numel() < 2:
        return ""
    if value.ndim > 1 and draw.maybe(0.7):
        return draw.choice(".mT", ".transpose(0, -1)", ".movedim(0, -1)", ".transpose(0, 1)")
    if value.ndim < 4 and draw.maybe(0.25) and value.numel() <= 200:
        return ".unsqueeze(0).expand(" + ", ".join(["2", *["-1"] * value.ndim]) + ")"
    return draw.choice("[..., ::2]", "[..., 1:]" if value.shape[-1] > 1 else "[::2]", "[::2]")


def _is_postfix(expression: str) -> bool:
    return isinstance(ast.parse(expression, mode="eval").body, (ast.Call, ast.Subscript, ast.Attribute, ast.Name))
