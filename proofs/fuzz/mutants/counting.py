"""Mutants of the collectives that a plan reports, which must be those that run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from proofs.fuzz.mutants.mutant import Change, Patch, mutant, replaced
from spmd.collectives.primitives import ALL_REDUCE, REDUCE_SCATTER
from spmd.collectives.primitives.chunks import chunk_lengths
from spmd.collectives.traffic import Traffic
from spmd.ir.list_schedule import schedule

_PRIMITIVES = "spmd.collectives.primitives"


def _ring(name: str, change: Change) -> tuple[Patch, ...]:
    """Patches of a ring algorithm in all collectives that use it."""
    users = {"gather_ring": ("all_reduce", "all_gather"), "scatter_ring": ("all_reduce", "reduce_scatter")}[name]
    return tuple(Patch(f"{_PRIMITIVES}.{user}", name, change) for user in users)


def _with_own(ring: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda blocks: [sum(ring(blocks)) // max(1, len(blocks) - 1)] * len(blocks)


def _unjoined(plan: Any) -> Any:
    return schedule(plan.graph.operations, frozenset(plan.graph.operations))


def _equal_blocks(counts: tuple[int, ...], shape: tuple[int, ...], *args: Any) -> int:
    return 2 * math.prod(shape) * (math.prod(counts) - 1) // math.prod(counts)


def _other_kind(record: Callable[..., None]) -> Callable[..., None]:
    renamed = {REDUCE_SCATTER.kind: "all_reduce"}
    return lambda traffic, kind, axes, sent: record(traffic, renamed.get(kind, kind), axes, sent)


MUTANTS = (
    mutant(
        "planned: largest block",
        "a rank of a gathering ring leaves out the largest block, not the smallest",
        *(
            replaced(
                f"{_PRIMITIVES}.{user}",
                "all_but_the_smallest",
                lambda length, counts: length - max(chunk for (chunk,) in chunk_lengths((length,), counts)),
            )
            for user in ("all_gather", "reduce_scatter")
        ),
        within="all_gather reduce_scatter",
    ),
    mutant(
        "planned: equal blocks",
        "an all_reduce is counted as if its blocks were equal",
        replaced(
            ALL_REDUCE, "most_sent", lambda counts, shape, *_: int(ALL_REDUCE.ring(*map(math.prod, (counts, shape))))
        ),
        within="all_reduce",
    ),
    mutant(
        "planned: least exchanged",
        "of an all_to_all the rank counts that sends least",
        replaced(
            f"{_PRIMITIVES}.all_to_all",
            "_exchanged",
            lambda split, concat, counts: min(
                held * (split - kept) for held, kept in chunk_lengths((concat, split), counts)
            ),
        ),
        within="all_to_all",
    ),
    mutant(
        "planned: one axis",
        "chunks over several axes are counted over the first one",
        Patch(
            f"{_PRIMITIVES}.chunks",
            "chunk_lengths",
            lambda find: lambda sizes, counts: find(sizes, (math.prod(counts),)) if counts else frozenset({sizes}),
        ),
        within="gathered_at_once",
    ),
    mutant(
        "planned: exchange of the first rank",
        "an all_to_all of uneven chunks is counted at the first rank's group",
        Patch(
            f"{_PRIMITIVES}.all_to_all",
            "_lengths",
            lambda find: lambda spec, dim: frozenset([max(find(spec, dim))]),
        ),
        within="uneven_exchange",
    ),
    mutant(
        "planned: bodies",
        "the collectives of local bodies are not in the plan",
        replaced("spmd.plan.cost.account", "local_collectives", lambda draft, operation, chosen: ()),
    ),
    mutant(
        "planned: order of lists",
        "collectives are listed in the order of operations, before list operators are joined",
        replaced("spmd.plan.cost.account", "scheduled", _unjoined),
        within="list_of_reductions",
    ),
    mutant(
        "counted: own block",
        "a rank of a gathering ring counts its own block, too",
        *_ring("gather_ring", _with_own),
        within="all_gather all_reduce",
    ),
    mutant(
        "counted: scattering",
        "a rank of a scattering ring counts as one of a gathering ring",
        *_ring("scatter_ring", lambda ring: lambda blocks: ring(blocks[1:] + blocks[:1])[::-1][:1] * len(blocks)),
        within="reduce_scatter all_reduce",
    ),
    mutant(
        "counted: kind",
        "a reduce_scatter is recorded as an all_reduce",
        Patch(Traffic, "record", _other_kind),
        within="reduce_scatter",
    ),
)
