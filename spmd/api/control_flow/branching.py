"""One of two functions by a predicate, over flat lists of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spmd.api.control_flow.place import CallPlace, here
from spmd.api.control_flow.predicates import is_batched, read


def branch(
    predicate: bool | Tensor, on_true: Callable[[], list[Tensor]], on_false: Callable[[], list[Tensor]], call: str
) -> list[Tensor]:
    """The results of the function that a predicate selects; for a batch of predicates, of both, selected by each."""
    if here() is CallPlace.PROGRAM:
        from spmd.tracing.loops import traced_cond  # with the rules, which `import spmd` leaves out

        return traced_cond(predicate, on_true, on_false)
    if isinstance(predicate, Tensor) and is_batched(predicate):
        return [torch.where(predicate, a, b) for a, b in zip(on_true(), on_false(), strict=True)]
    return on_true() if read(predicate, call) else on_false()
