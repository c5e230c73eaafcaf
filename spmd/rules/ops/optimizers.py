"""Rules of torch's fused optimizers: elementwise in parameters, gradients and states."""

from __future__ import annotations

from types import MappingProxyType

from spmd.ir.list_operators import FUSED
from spmd.rules.builders import pointwise
from spmd.rules.rule import Table

OPTIMIZERS: Table = MappingProxyType(dict.fromkeys(FUSED, pointwise()))
"""In a plan, lists have one element. Numbers of steps and learning rates are 0-d: they broadcast."""
