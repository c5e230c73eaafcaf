"""One of two functions by a predicate, over flat lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from spmd.api.control_flow.place import in_program
from spmd.api.control_flow.predicates import is_batched, read
from spmd.core.pytree import tree_map
from spmd.errors import TraceError
from spmd.tracing.draw_scopes import in_scope
from spmd.tracing.source import where

Operands: TypeAlias = tuple[Any, ...]


def branch(
    predicate: bool | Tensor,
    on_true: Callable[[Operands], list[Tensor]],
    on_false: Callable[[Operands], list[Tensor]],
    operands: Operands,
    call: str,
    probability: float | None = None,
) -> list[Tensor]:
    """The results of the function that a predicate selects; for a batch of predicates, of both, selected by each.

    The planner weighs the time of both by the probability of the first one, if that is known.
    """
    on_true, on_false = in_scope(on_true), in_scope(on_false)
    if in_program():
        from spmd.tracing.loops import traced_cond  # with the rules, which `import spmd` leaves out

        return traced_cond(predicate, lambda: on_true(operands), lambda: on_false(operands), probability)
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


def probability_of(value: Any, call: str, name: str) -> float:
    """The argument `name`, a probability; TraceError if it is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    got = f"{type(value).__name__} {value!r:.60}"
    raise TraceError(f"{call} at {where()}: {name} must be a number between 0 and 1 (got {got}).")
