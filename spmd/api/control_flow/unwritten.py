"""Calls of a user's functions whose arguments are not written to, where Python runs a loop or a branch.

In a program such a write is an error: arguments are values, and other trips or the other side may read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from spmd.api.control_flow.place import in_program
from spmd.core.modules import version_of
from spmd.core.pytree import tree_leaves
from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.tracing.active_transforms import unwrapped
from spmd.tracing.source import where


def called(function: Callable[..., Any], *arguments: Any, call: str, name: str) -> Any:
    """What a function returns.

    Args:
        function: the function.
        arguments: its arguments, pytrees.
        call: the loop or the branch, for messages: `spmd.scan`.
        name: what the function is there: `body_fun`.

    Raises:
        TraceError: it has written to a tensor of its arguments in place.
    """
    if in_program():  # whose trace refuses it by its line
        return function(*arguments)
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    before = [version_of(unwrapped(x)) for x in tensors]
    result = function(*arguments)
    for x, version in zip(tensors, before, strict=True):
        if version_of(unwrapped(x)) != version:
            raise TraceError(
                f"{call} at {where()}: {name} writes in place to its argument {TensorMeta.of(x)}. Arguments are never "
                "mutated: compute a new tensor, or write to a copy (x = x.clone()), and return it."
            )
    return result
