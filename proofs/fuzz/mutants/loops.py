"""Mutants of loops and branches: ties between trips, what moves before a loop, transposes, and the order of items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from proofs.fuzz.mutants.mutant import Change, Mutant, Patch, mutant, replaced
from proofs.fuzz.mutants.passes import blind_to_draws
from proofs.fuzz.pool import LOOPS
from spmd.ir.regions import MERGE, NEXT
from spmd.rules import find_rule
from spmd.rules.partial import ignores
from spmd.runtime.region_code import joined

_DERIVATIVES = "spmd.tracing.loops.derivatives"


def _of_loop(change: Callable[..., Any]) -> Change:
    """A change of the derivative of a loop, from the loop and its derivative."""
    return lambda make: lambda loop, apply: change(loop, make(loop, apply))


def _without_carries(loop: Any, found: Any) -> Any:
    return attrs.evolve(found, inputs=tuple(-1 if number < loop.carries else number for number in found.inputs))


def _in_the_same_order(loop: Any, found: Any) -> Any:
    return attrs.evolve(found, backward=attrs.evolve(found.backward, reverse=loop.reverse))


def _complete_after_the_loop(factorize: Any) -> Any:
    """The factors of `next_` with partial sums that count as complete."""

    def factors(call: Any) -> Any:
        return attrs.evolve(factorize(call), rows=tuple(ignores("new carry")(call)))

    return factors


def _backwards(parts: list[torch.Tensor], reverse: bool, *rest: Any) -> torch.Tensor:
    return joined(parts, not reverse, *rest)


def _of(name: str, breaks: str, *patches: Patch) -> Mutant:
    return mutant(name, breaks, *patches, within=" ".join(LOOPS))


def _untied(op: Any) -> Patch:
    return Patch(
        "spmd.plan.search.problem", "TIED", lambda tied: {key: at for key, at in tied.items() if key is not op}
    )


MUTANTS = (
    _of("tie: next", "a carry is sharded in the next trip as the loop begins with it, or otherwise", _untied(NEXT)),
    _of("tie: merge", "the sides of a branch have results of different shardings", _untied(MERGE)),
    _of(
        "moved: draws",
        "random numbers are drawn before a loop, once for all trips",
        blind_to_draws("spmd.tracing.canonicalize.canonicalize", "PASSES", "move_invariants"),
    ),
    _of(
        "transpose: carries of a loop",
        "what a loop begins with has no gradient",
        Patch(_DERIVATIVES, "_loop", _of_loop(_without_carries)),
    ),
    _of(
        "transpose: order of trips",
        "the derivative of a loop runs in the order of the loop",
        Patch(_DERIVATIVES, "_loop", _of_loop(_in_the_same_order)),
    ),
    _of(
        "transpose: sums of a loop",
        "partial sums that a loop carries are not reduced after it",
        Patch(find_rule(NEXT), "factorize", _complete_after_the_loop),
    ),
    _of(
        "stack: order of trips",
        "the results of trips are stacked in the opposite order",
        replaced("spmd.runtime.region_code", "joined", _backwards),
    ),
)
