"""Mutants of planning and lowering: the program of a rank on its shards.

An atom is a factor of a tensor's dim that can be sharded on its own; views split and join dims at atoms.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from proofs.fuzz.mutants.mutant import Patch, mutant, replaced, returning
from spmd.plan.data.layout import Layout
from spmd.plan.local.calls import local_implementation
from spmd.plan.local.fragments import Fragments
from spmd.rules.builders import pointwise

_FRAGMENTS, _STEPS, _CANDIDATES = "spmd.plan.local.fragments", "spmd.plan.local.steps", "spmd.plan.search.candidates"


def _planned_implementation(fragments: Fragments, operation: Any) -> Any:
    return local_implementation(fragments.plan.strategies.get(operation, {}))


def _reversed_axes(found: Any) -> Any:
    return None if found is None else (found[0], found[1][::-1])


def _any_order(carry: Any) -> Any:
    """Ignore whether axes follow the planning order."""
    return lambda mesh, axes, atoms, order: carry(mesh, axes, atoms, axes)


def _indivisible(carry: Any) -> Any:
    """Shard the leading atom by all axes, whether they divide it or not."""
    return lambda mesh, axes, atoms, order: [axes, *((),) * (len(atoms) - 1)]


class _Once(Counter[Any]):
    """Counts each value once."""

    def __getitem__(self, value: Any) -> int:
        return min(super().__getitem__(value), 1)


MUTANTS = (
    mutant(
        "sizes",
        "size arguments of views, of `expand` and of factories stay those of the whole tensor",
        replaced(_FRAGMENTS, "with_local_size", lambda args, position, shape: args),
    ),
    mutant(
        "empty shards",
        "the operator runs on empty shards, where its rule has another computation",
        replaced(Fragments, "local_implementation", _planned_implementation),
    ),
    mutant(
        "uneven ranks",
        "all ranks run the program of the first",
        replaced("spmd.lowering.lower", "_uneven_specs", lambda plan: ()),
    ),
    mutant(
        "bodies: axes",
        "a local body over several axes takes them minor first",
        returning(_FRAGMENTS, "local_implementation", _reversed_axes),
    ),
    mutant(
        "bodies: whole operands",
        "a local body takes its shard for the whole operand",
        replaced(Layout, "without", lambda layout, axes: layout),
    ),
    mutant(
        "steps: merged",
        "a step over a dim of several atoms always shards the whole dim",
        replaced(_STEPS, "_merges", lambda group, mesh: True),
        within="minor_factor",
    ),
    mutant(
        "steps: uneven atoms",
        "a step over the leading of several atoms shards the whole dim though chunks are uneven",
        Patch(
            _STEPS,
            "_merges",
            lambda merges: lambda group, mesh: merges(group, mesh) or bool(group[0].source or group[0].target),
        ),
        within="minor_factor",
    ),
    mutant(
        "edges: order of axes",
        "axes of an argument's dim are taken in an order other than planned",
        Patch("spmd.plan.search.boundary", "_carry_dim", _any_order),
    ),
    mutant(
        "edges: indivisible atoms",
        "an argument's chunks pass for chunks of the leading atom though they do not divide it",
        Patch("spmd.plan.search.boundary", "_carry_dim", _indivisible),
    ),
    mutant(
        "atoms: opaque factors",
        "a factor may be sharded where a dim has other atoms than it",
        replaced("spmd.rules.strategy", "_opaque_factors", lambda dims, logical: frozenset()),
        within="disagreeing_views views_of_shards",
    ),
    mutant(
        "candidates: kinds of reduction",
        "a value may wait for a sum on one axis and for a maximum on another",
        replaced(_CANDIDATES, "_has_same_reduction", lambda draft, value, state: True),
        within="two_reductions",
    ),
    mutant(
        "candidates: bodies",
        "different local bodies may run on two axes",
        replaced(_CANDIDATES, "runs_together", lambda strategy, other: True),
        within="shards_of_images",
    ),
    mutant(
        "joined redistributions",
        "a redistribution is joined with its first consumer, whoever else reads it",
        replaced("spmd.plan.search.join", "Counter", _Once),
        within="reshard constrain",
    ),
    mutant(
        "draws: each rank",
        "every rank draws random numbers of its own",
        replaced("spmd.runtime.virtual", "effect_of", lambda op, args, kwargs: None),
        within="dropout rand_like randn_like bernoulli randperm rand rand_twice rand_unused rand_inplace",
    ),
    mutant(
        "draws: shards",
        "a draw may be sharded",
        replaced("spmd.plan.search.prepare", "RANDOM_RULE", pointwise()),
        within="dropout rand_like randn_like bernoulli randperm rand rand_twice rand_unused rand_inplace",
    ),
)
