"""Python numbers of a program that are given at each call, and what is computed from them.

A number is an argument of operations, as a constant is, and no operand: plans, rules and costs see a float that equals
no other. Numbers are computed in Python before the first operation of a rank's program, and have torch's promotion of
Python numbers.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class Number(float):
    """A float that is known when the program runs: an argument of the function, or computed from such.

    As a float it is NaN, which equals no constant and is neither larger nor smaller, so that what is decided by the
    value of a constant takes it for a value like any other. Arithmetic makes other numbers. Numbers that are computed
    in the same way are equal.

    Args:
        name: its name in the program.
        position: of an argument: its position among the numbers of a call; -1 for one that is computed.
        op, args: what computes it: a function in `OPERATORS`, and its arguments.
        value: its value in the call that is traced.
        note: is called with the number where Python needs its value, so that the program holds for this value only.
    """

    __slots__ = ("_key", "args", "name", "note", "op", "position", "value")

    _key: str
    name: str
    position: int
    op: Callable[..., Any] | None
    args: tuple[Any, ...]
    value: Any
    note: Callable[[Number], None]

    def __new__(
        cls,
        name: str,
        position: int,
        value: Any,
        note: Callable[[Number], None],
        op: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
    ) -> Self:
        made = super().__new__(cls, math.nan)
        made.name, made.position, made.op, made.args = name, position, op, args
        made.value, made.note = value, note
        keys = [arg._key if isinstance(arg, Number) else repr(arg) for arg in args]
        made._key = hashlib.sha256(repr((position, op and OPERATORS[op], keys)).encode()).hexdigest()
        return made

    @classmethod
    def computed(cls, op: Callable[..., Any], *args: Any) -> Number:
        """What a function in `OPERATORS` computes of numbers, of which one at least is a `Number`."""
        first = next(arg for arg in args if isinstance(arg, Number))
        value = op(*(arg.value if isinstance(arg, Number) else arg for arg in args))
        made = cls(f"({OPERATORS[op].format(*map(repr, args))})", -1, value, first.note, op, args)
        if len(made.name) > _LONGEST:
            made.name = f"number_{made._key[:8]}"
        return made

    def settle(self) -> Any:
        """Its value in the call that is traced: the program holds for this value only."""
        self.note(self)
        return self.value

    def evaluate(self, given: Sequence[float]) -> Any:
        """Its value for the numbers of a call."""
        known: dict[Number, Any] = {}
        for number in in_order([self]):
            args = [known[arg] if isinstance(arg, Number) else arg for arg in number.args]
            known[number] = given[number.position] if number.op is None else number.op(*args)
        return known[self]

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and self._key == other._key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key)

    def __bool__(self) -> bool:
        return True

    def __float__(self) -> float:
        return float(self.settle())

    def __neg__(self) -> Number:
        return Number.computed(operator.neg, self)

    def __add__(self, other: Any) -> Any:
        return Number.computed(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return Number.computed(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return Number.computed(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return Number.computed(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return Number.computed(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return Number.computed(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return Number.computed(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return Number.computed(operator.truediv, other, self)

    def __pow__(self, other: Any, modulo: None = None) -> Any:
        return Number.computed(operator.pow, self, other)

    def __rpow__(self, other: Any, modulo: None = None) -> Any:
        return Number.computed(operator.pow, other, self)

    def __abs__(self) -> Number:
        return Number.computed(abs, self)


OPERATORS = MappingProxyType({
    operator.add: "{} + {}", operator.sub: "{} - {}", operator.mul: "{} * {}", operator.truediv: "{} / {}",
    operator.pow: "{}**{}", operator.mod: "{} % {}", operator.neg: "-{}", abs: "abs({})", math.sqrt: "sqrt({})",
    min: "min({}, {})", max: "max({}, {})", operator.lt: "{} < {}", operator.le: "{} <= {}", operator.gt: "{} > {}",
    operator.ge: "{} >= {}", operator.eq: "{} == {}", operator.ne: "{} != {}",
})  # fmt: skip
"""The functions that compute numbers, and their texts."""

_LONGEST = 80
"""The most characters of the name of a number that shows how it is computed."""


def arguments_among(numbers: Iterable[Number]) -> list[Number]:
    """The numbers of a call from which numbers are computed, by position."""
    found = {number.position: number for number in in_order(numbers) if number.op is None}
    return [found[position] for position in sorted(found)]


def in_order(numbers: Iterable[Number]) -> Iterator[Number]:
    """Numbers and those that they are computed from, each once, and after what it is computed from."""
    done: set[Number] = set()
    stack = list(reversed(list(numbers)))
    while stack:
        number = stack[-1]
        missing = [arg for arg in number.args if isinstance(arg, Number) and arg not in done]
        if missing:
            stack += missing
            continue
        stack.pop()
        if number not in done:
            done.add(number)
            yield number
