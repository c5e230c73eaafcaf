"""Warnings about random tensors that each rank draws whole."""

from __future__ import annotations

from spmd.core.quantity import size_text
from spmd.core.spec import TensorMeta
from spmd.inspect.plan import Plan
from spmd.ir.source import Source
from spmd.tracing.source import user_source, warn_at

LARGE = 64 * 10**6
"""The bytes of a whole draw above which a rank warns of it."""


def warn_of_whole_draws(plan: Plan) -> None:
    """Warn, once for each line, of draws from torch's generator that take much memory on each of several ranks."""
    if plan.mesh.size == 1:
        return
    largest: dict[Source | None, TensorMeta] = {}
    for operation in plan.graph.operations:
        if operation.is_random:
            held = largest.get(operation.source)
            metas = (value.meta for value in operation.tensors if held is None or value.meta.nbytes > held.nbytes)
            largest.update((operation.source, meta) for meta in metas)
    for source, meta in largest.items():
        if meta.nbytes > LARGE and source not in _warned:
            _warned.add(source)
            warn_at(
                f"Each rank draws {meta}, {size_text(meta.nbytes)}, whole: torch's generator has the numbers of one "
                'device in their order. spmd.jit(..., rng="counter") draws by shard, other numbers that are equal on '
                "every mesh.",
                source or user_source(),
            )


_warned: set[Source | None] = set()
