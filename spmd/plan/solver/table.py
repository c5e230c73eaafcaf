"""Cost tables: what every part of the search speaks in."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Table(NamedTuple):
    """A cost for every combination of values of some variables.

    Args:
        variables: the variables, ascending.
        costs: float64, one dim a variable; infinity where a combination is impossible.
    """

    variables: tuple[int, ...]
    costs: torch.Tensor
