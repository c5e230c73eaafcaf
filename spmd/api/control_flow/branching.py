"""One of two functions by a predicate, over flat lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from spmd.api.control_flow.place import in_program
from spmd.api.control_flow.predicates import is_batched, read
from spmd.core.pytree import tree_map

Operands: TypeAlias = tuple[Any, ...]


def branch(
    predicate: bool | Tensor,
    on_true: Callable[[Operands], list[Tensor]],
    on_false: Callable[[Operands], list[Tensor]],
    operands: Operands,
    call: str,
) -> list[Tensor]:
    """The results of the function that a predicate selects; for a batch of predicates, of both, selected by each."""
    if in_program():
        from spmd.tracing.loops import traced_cond  # with the rules, which `import spmd` leaves out

        return traced_cond(predicate, lambda: on_true(operands), lambda: on_false(operands))
    if isinstance(predicate, Tensor) and is_batched(predicate):
        pairs = zip(on_true(_selected(predicate, operands)), on_false(_selected(~predicate, operands)), strict=True)
        return [x if x is y else torch.where(predicate, x, y) for x, y in pairs]
    return on_true(operands) if read(predicate, call) else on_false(operands)


def _selected(which: Tensor, operands: Operands) -> Operands:
    """Operands with the gradient of those examples for which a function is selected.

    That of the others would be zero times their derivative, which may be infinite.
    """

    def leaf(x: Any) -> Any:
        return (
            torch.where(which, x, x.detach())
            if isinstance(x, Tensor) and is_batched(x) and x.is_floating_point()
            else x
        )

    selected: Operands = tree_map(leaf, operands)
    return selected
