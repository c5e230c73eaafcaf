"""Python numbers of a function that is traced: dynamic until Python needs their values, which makes a guard."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch

from spmd.core.static_key import static_key
from spmd.ir.graph import iterate_leaves
from spmd.ir.number import Number
from spmd.ir.source import Source
from spmd.tracing.source import user_source


@attrs.frozen
class Guard:
    """What a trace has taken for granted of the numbers of its call.

    Args:
        number: a number, or a comparison of numbers.
        value: the value that it had.
        source: the line where Python needed the value.
    """

    number: Number
    value: float | bool
    source: Source | None

    def holds(self, given: Sequence[float]) -> bool:
        """Whether it holds for the numbers of another call."""
        try:
            return static_key(self.number.evaluate(given)) == static_key(self.value)
        except ArithmeticError:
            return False


class Guards:
    """The guards of one trace, in the order in which they were made."""

    def __init__(self) -> None:
        self._found: dict[Number, Guard] = {}

    @property
    def found(self) -> tuple[Guard, ...]:
        """The guards, one for each number or comparison."""
        return tuple(self._found.values())

    def add(self, number: Number) -> None:
        """Add a guard for the value of a number, from the line of the user's that is running."""
        if number not in self._found:
            self._found[number] = Guard(number, number.value, user_source())


class TracedFloat(torch.SymFloat):
    """A number of a function that is traced.

    Torch passes it on to operators as it is, with the promotion of a Python number. Arithmetic with Python's numbers
    makes other numbers; Python code that needs its value gets that of the call that is traced.
    """

    node: NumberNode

    def __float__(self) -> float:
        return self.node.guard_float()

    def __int__(self) -> int:
        return int(float(self))

    def __bool__(self) -> bool:
        return _compare(operator.ne, self, 0.0)

    def __hash__(self) -> int:
        return hash(float(self))

    def __repr__(self) -> str:
        return str(self.node)

    def __str__(self) -> str:
        return str(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Itself for functions of NumPy, which need its value."""
        return sys.modules["numpy"].asarray(float(self), dtype)  # it is there: it calls this

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Arithmetic with NumPy's floats, whose operators call this, is Python's; other functions need values."""
        op = _UNIVERSAL.get(function.__name__) if method == "__call__" and not options else None
        if op is not None and all(isinstance(x, (int, float, torch.SymFloat)) for x in inputs):
            return op(*(float(x) if isinstance(x, float) else x for x in inputs))
        return getattr(function, method)(*map(settled, inputs), **options)

    def __neg__(self) -> Any:
        return _compute(operator.neg, self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return _compute(abs, self)

    def __trunc__(self) -> int:
        return math.trunc(float(self))

    def __floor__(self) -> int:
        return math.floor(float(self))

    def __ceil__(self) -> int:
        return math.ceil(float(self))

    def __round__(self, digits: int | None = None) -> Any:
        return round(float(self), digits)

    def __floordiv__(self, other: Any) -> Any:
        return float(self) // other

    def __rfloordiv__(self, other: Any) -> Any:
        return other // float(self)

    def __divmod__(self, other: Any) -> Any:
        return divmod(float(self), other)

    def __rdivmod__(self, other: Any) -> Any:
        return divmod(other, float(self))

    def is_integer(self) -> bool:
        return float(self).is_integer()

    @property
    def real(self) -> Any:
        """Itself, as of a float."""
        return self

    @property
    def imag(self) -> float:
        """Zero, as of a float."""
        return 0.0

    def __sym_max__(self, other: Any) -> Any:
        return _compute(max, self, other)

    def __sym_min__(self, other: Any) -> Any:
        return _compute(min, self, other)

    def __sym_sqrt__(self) -> Any:
        return _compute(math.sqrt, self)

    def __sym_float__(self) -> Any:
        return self


def _binary(op: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The methods of an operator for a number as its first and as its second operand."""

    def forward(self: TracedFloat, other: Any) -> Any:
        return _operate(op, other, self, other)

    def backward(self: TracedFloat, other: Any) -> Any:
        return _operate(op, other, other, self)

    return forward, backward


def _operate(op: Callable[..., Any], other: Any, *args: Any) -> Any:
    if isinstance(other, complex):
        return op(*map(settled, args))
    if not isinstance(other, (bool, int, float, torch.SymFloat)):
        return NotImplemented
    return _compare(op, *args) if op in _COMPARISONS else _compute(op, *args)


_COMPARISONS = {
    operator.eq: "eq", operator.ne: "ne", operator.lt: "lt", operator.le: "le", operator.gt: "gt", operator.ge: "ge",
}  # fmt: skip
_ARITHMETIC = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.truediv: "truediv", operator.pow: "pow",
    operator.mod: "mod",
}  # fmt: skip

_UNIVERSAL = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
}  # fmt: skip
"""The operators of NumPy's functions by their names."""

for _op, _name in _ARITHMETIC.items():
    _forward, _backward = _binary(_op)
    setattr(TracedFloat, f"__{_name}__", _forward)
    setattr(TracedFloat, f"__r{_name}__", _backward)
for _op, _name in _COMPARISONS.items():
    setattr(TracedFloat, f"__{_name}__", _binary(_op)[0])


def number_of(value: Any) -> Any:
    """The number of the program for a traced one; any other value unchanged."""
    return value.node.number if isinstance(value, torch.SymFloat) else value


def value_of(value: Any) -> Any:
    """The value of a traced number in the call that is traced; any other value unchanged."""
    number = number_of(value)
    return number.value if isinstance(number, Number) else number


def settled(value: Any) -> Any:
    """As `value_of`: the program holds for this value only."""
    number = number_of(value)
    return number.settle() if isinstance(number, Number) else number


def traced(value: Any) -> Any:
    """The traced number for one of the program; any other value unchanged."""
    return TracedFloat(NumberNode(value)) if isinstance(value, Number) else value


def has_number(tree: Any) -> bool:
    """Whether there is a traced number in nested tuples, lists and dicts."""
    return any(isinstance(leaf, torch.SymFloat) for leaf in iterate_leaves(tree))


def tensor_of_numbers(data: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> torch.Tensor:
    """`torch.tensor` of numbers of which some are traced: torch would take their values."""
    if isinstance(data, (list, tuple)):
        made = torch.stack([tensor_of_numbers(item, dtype, device) for item in data])
    else:
        made = torch.full((), data, dtype=dtype or torch.get_default_dtype(), device=device)
    return made.requires_grad_(options["requires_grad"]) if options.get("requires_grad") else made


def _power_of(x: torch.Tensor, exponent: Any) -> torch.Tensor:
    return torch.pow(x, _as_tensor(exponent, x) if _keeps_digits(x) else exponent)


def _power_with(x: torch.Tensor, base: Any) -> torch.Tensor:
    return torch.pow(_as_tensor(base, x), x)


def _power(first: Any, second: Any) -> torch.Tensor:
    return _power_of(first, second) if isinstance(first, torch.Tensor) else _power_with(second, first)


def _lerp(x: torch.Tensor, end: torch.Tensor, weight: Any) -> torch.Tensor:
    return torch.lerp(x, end, _as_tensor(weight, x) if _keeps_digits(x) else weight)


def _keeps_digits(x: torch.Tensor) -> bool:
    """Whether a kernel reads a number in the dtype of such a tensor, and not in one of more bits."""
    return torch.result_type(x, 1.0) in (torch.float32, torch.float64)


def _as_tensor(number: Any, x: torch.Tensor) -> torch.Tensor:
    """A number as a 0-d tensor that has the dtype of its result with a tensor."""
    return torch.full((), number, dtype=torch.result_type(x, 1.0), device=x.device)


DIFFERENTIABLE_IN_TENSORS: Mapping[Any, Callable[..., Any]] = MappingProxyType({
    torch.pow: _power, torch.Tensor.pow: _power_of, torch.Tensor.__pow__: _power_of, torch.Tensor.__rpow__: _power_with,
    torch.lerp: _lerp, torch.Tensor.lerp: _lerp,
})  # fmt: skip
"""Functions whose derivatives read the values of numbers: with traced numbers, these compute the same with tensors."""


def _compute(op: Callable[..., Any], *args: Any) -> Any:
    """A number that is computed from others; a constant if it is computed from constants."""
    if op is operator.pow and not _compare(operator.ge, args[0], 0.0):  # the power may be complex
        return op(*map(settled, args))
    numbers = [_plain(number_of(arg)) for arg in args]
    if not any(isinstance(number, Number) for number in numbers):
        return op(*numbers)
    return traced(Number.computed(op, *numbers))


def _plain(number: Any) -> Any:
    """A number of a class that is derived from Python's, such as NumPy's floats and enums, as one of Python."""
    if isinstance(number, Number):
        return number
    return next((kind(number) for kind in (float, bool, int) if isinstance(number, kind)), number)


def _compare(op: Callable[..., Any], *args: Any) -> bool:
    """The truth of a comparison, which becomes a guard."""
    found = _compute(op, *args)
    return bool(settled(found))


class NumberNode:
    """The node of a `TracedFloat`, by which torch's C++ code knows it; it has the methods of `torch.fx`'s SymNode.

    Args:
        number: the number; a constant in computations of torch's with constants.
    """

    def __init__(self, number: Any) -> None:
        self.number = number

    def __str__(self) -> str:
        return str(self.number)

    def guard_float(self, *place: Any) -> Any:
        """The value, for Python or for an operator that takes no other."""
        return self.number.settle() if isinstance(self.number, Number) else self.number

    guard_bool = expect_true = guard_size_oblivious = guard_or_false = guard_or_true = bool_ = guard_float

    def is_int(self) -> bool:
        return False

    def is_float(self) -> bool:
        return not self.is_bool()

    def is_bool(self) -> bool:
        return isinstance(value_of(torch.SymFloat(self)), bool)

    def is_constant(self) -> bool:
        return False

    is_nested_int = is_symbolic_int = is_int

    def is_symbolic(self) -> bool:
        return True

    has_hint = is_symbolic

    def statically_known_true(self, *place: Any) -> bool:
        return False

    def maybe_as_int(self) -> None:
        return None

    maybe_as_float = maybe_as_bool = constant_int = constant_bool = nested_int = maybe_as_int

    def str(self) -> str:
        return str(self)

    _graph_repr = str

    def clone(self) -> NumberNode:
        return self

    sym_float = clone

    def wrap_float(self, value: float) -> NumberNode:
        return NumberNode(float(value))

    wrap_int = wrap_bool = wrap_float

    def _made(self, op: Callable[..., Any], *others: NumberNode) -> NumberNode:
        return NumberNode(number_of(_compute(op, *map(torch.SymFloat, (self, *others)))))

    def neg(self) -> NumberNode:
        return self._made(operator.neg)

    def sym_min(self, other: NumberNode) -> NumberNode:
        return self._made(min, other)

    def sym_max(self, other: NumberNode) -> NumberNode:
        return self._made(max, other)


def _node_method(op: Callable[..., Any]) -> Callable[..., NumberNode]:
    return lambda self, other: self._made(op, other)  # type: ignore[no-any-return]


for _op, _name in {**_ARITHMETIC, **_COMPARISONS}.items():
    setattr(NumberNode, _name, _node_method(_op))
NumberNode.float_truediv = NumberNode.truediv  # type: ignore[attr-defined]
NumberNode.float_pow = NumberNode.pow  # type: ignore[attr-defined]
