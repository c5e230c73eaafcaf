"""One call of one operator as rules see it: what its tensors are like, and not which they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.errors import RuleError

REQUIRED = object()
"""Says that an operator must have an argument."""


@attrs.frozen(eq=False)
class Call:
    """One call of an operator: its arguments with a TensorMeta in place of every tensor."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[TensorMeta, ...]

    @property
    def operands(self) -> tuple[TensorMeta, ...]:
        """The tensor arguments in order of appearance, also from inside lists."""
        return tuple(_metas((self.args, *self.kwargs.values())))

    def argument(self, name: str, otherwise: Any = REQUIRED) -> Any:
        """An argument by its name in the operator's schema, its default if it was not given.

        Raises:
            RuleError: the operator has no such argument, and `otherwise` does not say what it stands for then.
        """
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if name in self.kwargs:
                    return self.kwargs[name]
                return self.args[position] if position < len(self.args) else argument.default_value
        if otherwise is REQUIRED:
            raise RuleError(f"{self.op} has no argument {name!r}.")
        return otherwise


def _metas(argument: Any) -> Iterator[TensorMeta]:
    if isinstance(argument, TensorMeta):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from _metas(item)
