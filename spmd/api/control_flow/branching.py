"""One of two functions by a predicate, over flat lists of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spmd.api.control_flow.place import CallPlace, here
from spmd.api.control_flow.predicates import is_batched, read
from spmd.errors import TraceError
from spmd.tracing.loops import traced_cond
from spmd.tracing.source import where


def branch(
    predicate: bool | Tensor, on_true: Callable[[], list[Tensor]], on_false: Callable[[], list[Tensor]], call: str
) -> list[Tensor]:
    """The results of the function that a predicate selects; for a batch of predicates, of both, selected by each.

    Raises:
        TraceError: a tensor decides in the trace of a shard_map body.
    """
    place = here()
    if place is CallPlace.PROGRAM:
        return traced_cond(predicate, on_true, on_false)
    if place is CallPlace.BODY and isinstance(predicate, Tensor):
        raise TraceError(
            f"{call} at {where()} decides by a tensor in a shard_map body, which the program of all ranks cannot do "
            "yet. Compute both and take torch.where(predicate, a, b), or decide outside of shard_map."
        )
    if isinstance(predicate, Tensor) and is_batched(predicate):
        return [torch.where(predicate, a, b) for a, b in zip(on_true(), on_false(), strict=True)]
    return on_true() if read(predicate, call) else on_false()
