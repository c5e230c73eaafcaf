"""The parts of the search that can be exchanged or left out, as proofs of it do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from spmd.plan.solver.elimination import Solution, minimize
from spmd.plan.solver.table import Table


@attrs.frozen
class SearchOptions:
    """The options of `plan`, which leave its input as it is.

    Args:
        minimize: the exact solver; it raises TooWideError where the search must not be exact.
        bound_cells: the most cells of a table in the lower bound that a non-exact search computes its gap from.
        joins: whether two redistributions in a row may become one.
        fold: whether equal layers are planned once.
        fewer_launches: whether a plan is tried for which launches take twice as long.
    """

    minimize: Callable[[Sequence[int], Sequence[Table]], Solution] = minimize
    bound_cells: int = 2**16
    joins: bool = True
    fold: bool = True
    fewer_launches: bool = True


SEARCH = SearchOptions()
"""The search of `jit`."""
