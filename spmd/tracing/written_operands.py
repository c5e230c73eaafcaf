"""Operators of third parties that write to operands, as functions: a program holds functional operators only."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import can_auto_functionalize

_LIBRARY = torch.library.Library("spmd_functional", "FRAGMENT")
_ALIAS = re.compile(r"\(\w+!?\)")


def writes_to_operands(func: torch._ops.OpOverload) -> bool:
    """Whether an operator is one of a third party that writes to tensors among its operands."""
    return (
        func._schema.is_mutable
        and can_auto_functionalize(func)
        and all(str(x.type) == "Tensor" for x in _written(func))
    )


def write(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the functional form of an operator, write what it returns for operands to them, and return the rest."""
    given = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | dict(kwargs)
    targets = [given[argument.name] for argument in _written(func)]
    found = functional_form(func)(**given)
    found = list(found) if isinstance(found, (tuple, list)) else [found]
    for target, value in zip(targets, found[len(found) - len(targets) :], strict=True):
        target.copy_(value)
    own = found[: len(found) - len(targets)] or targets[: len(func._schema.returns)]
    return own[0] if len(own) == 1 else tuple(own) or None


@functools.cache
def functional_form(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """`spmd_functional::NAME`: it has the operands of an operator, and returns its results and what operands become.

    Results that are operands, as of an operator that ends in `_`, are left out.
    """
    names = [argument.name for argument in func._schema.arguments]
    targets = [argument.name for argument in _written(func)]
    schema = str(func._schema)
    operands = _ALIAS.sub("", schema[schema.index("(") + 1 : schema.rindex(") ->")])
    own = [result for result in func._schema.returns if result.alias_info is None]
    results = ", ".join([*(str(result.type) for result in own), *["Tensor"] * len(targets)])
    name = func.name().replace("::", "_").replace(".", "_")
    _LIBRARY.define(f"{name}({operands}) -> ({results})")

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        for name in targets:
            given[name] = given[name].clone()
        found = func(**given)
        found = list(found) if isinstance(found, (tuple, list)) else [found]
        values = [*(found if own else ()), *(given[name] for name in targets)]
        return values[0] if len(values) == 1 else tuple(values)

    _LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"spmd_functional::{name}", call, lib=_LIBRARY)
    return getattr(torch.ops.spmd_functional, name).default  # type: ignore[no-any-return]


def _written(func: torch._ops.OpOverload) -> list[Any]:
    """The operands that an operator writes to."""
    return [x for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
