"""Draws of random numbers: whole on every rank, as `spmd.ir.random_operators` explains."""

from __future__ import annotations

from spmd.rules.builders import whole
from spmd.rules.rule import table

DRAW = whole()
"""The rule of a call that draws, whatever the rule of its operator without a draw."""

RANDOM = table({"empty_strided": DRAW})
"""`empty_strided` is what draws fill."""
