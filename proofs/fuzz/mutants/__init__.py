"""Mutation testing of the fuzzer: the package with one defect at a time, which the fuzzer must find."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from proofs.fuzz.mutants import collectives, counting, flows, layouts, loops, lowering, passes, resharding, rules
from proofs.fuzz.mutants.mutant import Mutant

FAMILIES: Mapping[str, tuple[Mutant, ...]] = MappingProxyType(
    {
        "Passes": passes.MUTANTS,
        "Rules: factors and local bodies": rules.MUTANTS,
        "Rules: flow of partial values": flows.MUTANTS,
        "Memory layouts": layouts.MUTANTS,
        "Derivatives": collectives.MUTANTS,
        "Loops and branches": loops.MUTANTS,
        "Resharding": resharding.MUTANTS,
        "Planning and lowering": lowering.MUTANTS,
        "Counting": counting.MUTANTS,
    }
)
"""All mutants, grouped by what they break."""

MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {mutant.name: mutant for family in FAMILIES.values() for mutant in family}
)
"""All mutants, by name."""

__all__ = ["FAMILIES", "MUTANTS", "Mutant"]
