"""Mutants of the collectives that a plan reports, which must be those that run."""

from __future__ import annotations

import math

from proofs.fuzz.mutants.mutant import Patch, mutant, replaced, returning
from spmd.collectives import bytes_sent as sent
from spmd.ir.comm import StepKind

_SENT, _TRAFFIC = "spmd.collectives.bytes_sent", "spmd.collectives.traffic"

MUTANTS = (
    mutant(
        "planned: largest block",
        "a rank of a gathering ring leaves out the largest block, not the smallest",
        replaced(
            _SENT,
            "_all_but_the_smallest",
            lambda length, counts: length - max(chunk for (chunk,) in sent.chunk_lengths((length,), counts)),
        ),
        within="all_gather reduce_scatter",
    ),
    mutant(
        "planned: equal blocks",
        "an all_reduce is counted as if its blocks were equal",
        replaced(_SENT, "_reduced", lambda numel, ranks: 2 * numel * (ranks - 1) // ranks),
        within="all_reduce",
    ),
    mutant(
        "planned: least exchanged",
        "of an all_to_all the rank counts that sends least",
        replaced(
            _SENT,
            "_exchanged",
            lambda split, concat, counts: min(
                held * (split - kept) for held, kept in sent.chunk_lengths((concat, split), counts)
            ),
        ),
        within="all_to_all",
    ),
    mutant(
        "planned: one axis",
        "chunks over several axes are counted over the first one",
        Patch(
            _SENT,
            "chunk_lengths",
            lambda find: lambda sizes, counts: find(sizes, (math.prod(counts),)) if counts else frozenset({sizes}),
        ),
        within="gathered_at_once",
    ),
    mutant(
        "planned: exchange of the first rank",
        "an all_to_all of uneven chunks is counted at the first rank's group",
        Patch(
            "spmd.collectives.step",
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
        replaced("spmd.plan.cost.account", "_executed", lambda plan: iter(plan.graph.operations)),
        within="list_of_reductions",
    ),
    mutant(
        "counted: own block",
        "a rank of a gathering ring counts its own block, too",
        returning(_TRAFFIC, "_gather_ring", lambda found: [sum(found) // max(1, len(found) - 1)] * len(found)),
        within="all_gather all_reduce",
    ),
    mutant(
        "counted: scattering",
        "a rank of a scattering ring counts as one of a gathering ring",
        Patch(
            _TRAFFIC, "_scatter_ring", lambda ring: lambda blocks: ring(blocks[1:] + blocks[:1])[::-1][:1] * len(blocks)
        ),
        within="reduce_scatter all_reduce",
    ),
    mutant(
        "counted: kind",
        "a reduce_scatter is recorded as an all_reduce",
        Patch(
            "spmd.collectives.virtual",
            "COLLECTIVES",
            lambda kinds: {
                op: StepKind.ALL_REDUCE if kind is StepKind.REDUCE_SCATTER else kind for op, kind in kinds.items()
            },
        ),
        within="reduce_scatter",
    ),
)
