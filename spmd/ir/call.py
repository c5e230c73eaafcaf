"""One call of one operator as sharding rules see it: tensors are known by shape and dtype only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.errors import RuleError

REQUIRED = object()
"""The default of `otherwise` in `Call.argument`: the operator must have the argument."""


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
        """An argument by its name in the operator's schema; the schema's default if it was not passed.

        Args:
            name: the name of the argument.
            otherwise: what to return if the operator has no such argument.

        Raises:
            RuleError: the operator has no such argument, and `otherwise` was not given.
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
