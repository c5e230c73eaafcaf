"""Random operators run replicated, as `spmd.ir.random_operators` explains."""

from __future__ import annotations

from spmd.rules.builders import replicated_only
from spmd.rules.rule import table

RANDOM_RULE = replicated_only()
"""The rule of every call that draws random numbers, also if its operator has another rule for calls that do not."""

RANDOM = table({"empty_strided": RANDOM_RULE})
"""`empty_strided` makes the tensors that random operators fill."""
