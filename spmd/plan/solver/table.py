"""Cost tables, the representation of costs in the whole search."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Table(NamedTuple):
    """A cost for every combination of values of some variables.

    Args:
        variables: the variables, ascending.
        costs: float64, one dim for each variable; infinity for an impossible combination.
    """

    variables: tuple[int, ...]
    costs: torch.Tensor
