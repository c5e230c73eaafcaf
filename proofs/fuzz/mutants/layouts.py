"""Mutants of memory layouts: the copies before kernels that read strides are left out."""

from __future__ import annotations

from proofs.fuzz.mutants.mutant import Mutant, Patch, mutant
from spmd.rules.layouts import Need

_NEEDS = "spmd.rules.layouts"

REACHED = (
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "native_group_norm.default",
    "view_as_complex.default",
)
"""The operators of `PROBED` that programs call on non-contiguous operands."""


def _of(name: str) -> Mutant:
    op = f"aten.{name}"
    return mutant(
        f"need: {name}",
        f"the operands of `{name}` keep the memory layout that they have",
        Patch(_NEEDS, "PROBED", lambda needs: {other: need for other, need in needs.items() if other != op}),
        within=op,
    )


MUTANTS = (
    *map(_of, REACHED),
    mutant(
        "need: rows",
        "every tensor passes for one whose rows have no gaps",
        Patch(Need, "is_met", lambda met: lambda need, tensor: need is Need.ROWS or met(need, tensor)),
        within="aten._scaled_dot_product_flash_attention_for_cpu.default",
    ),
    mutant(
        "need: contiguous",
        "a tensor whose rows have no gaps passes for contiguous",
        Patch(Need, "is_met", lambda met: lambda need, tensor: met(min(need, Need.ROWS), tensor)),
        within="aten.native_group_norm.default",
    ),
)
