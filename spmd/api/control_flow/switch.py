"""`switch`: one of several functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import TypeVarTuple, Unpack

from spmd.api.control_flow.branching import branch, probability_of
from spmd.api.control_flow.leaves import check_callable, device_of, integer_scalar
from spmd.api.control_flow.new_values import new_values
from spmd.api.control_flow.results import Results
from spmd.api.control_flow.unwritten import called
from spmd.core.pytree import tree_leaves
from spmd.errors import TraceError
from spmd.job.tracebacks import hides_internals_of_own_errors
from spmd.tracing.source import where

_CALL = "spmd.switch"
_Operands = TypeVarTuple("_Operands")
_Result = TypeVar("_Result")


@hides_internals_of_own_errors
def switch(
    index: int | Tensor,
    branches: Sequence[Callable[[Unpack[_Operands]], _Result]],
    *operands: Unpack[_Operands],
    probabilities: Sequence[float] | None = None,
) -> _Result:
    """Call the function `branches[index]`, with the index clamped to the branches; `jax.lax.switch`.

    It is `cond` of more than two functions, by halves: where each runs, and what is refused, are as of `cond`.

    Args:
        index: an integer, or a 0-d tensor of integers.
        branches: functions that return pytrees of one structure, with the same shapes and dtypes.
        operands: arguments of each.
        probabilities: how likely each function is chosen, by which the planner weighs their times, as of `cond`.

    Returns:
        What one of them returns, with numbers as tensors.

    Raises:
        TraceError: the index is no integer scalar; there is no branch, or they do not return the like; there is not one
            probability for each.

    >>> import torch
    >>> [switch(index, [torch.sin, torch.cos, torch.tan], torch.tensor(0.0)).item() for index in (-1, 1, 7)]
    [0.0, 1.0, 0.0]
    """
    if not isinstance(branches, Sequence) or not branches:
        raise TraceError(
            f"{_CALL} at {where()}: branches must be a list of at least one function (got {branches!r:.60})."
        )
    functions = [(f"branches[{number}]", function) for number, function in enumerate(branches)]
    check_callable(_CALL, functions)
    chosen = integer_scalar(index, _CALL, "index")
    likely = None if probabilities is None else _probabilities_of(probabilities, len(branches))
    results = Results(_CALL, device_of(index, operands))

    def call(number: int, given: tuple[Any, ...]) -> list[Tensor]:
        name, function = functions[number]
        return results.tensors(called(function, *given, call=_CALL, name=name), name)

    def choose(first: int, end: int, given: tuple[Any, ...]) -> list[Tensor]:
        """The results of one of some neighbours."""
        if end == first + 1:
            return call(first, given)
        middle = (first + end) // 2
        halves = functools.partial(choose, first, middle), functools.partial(choose, middle, end)
        either = 0.0 if likely is None else sum(likely[first:end])
        of_first = None if likely is None or not either else sum(likely[first:middle]) / either
        return branch(chosen < middle, *halves, given, _CALL, of_first)

    if isinstance(chosen, int):
        results.compare_traces(functions, operands)
        tensors = call(min(max(chosen, 0), len(functions) - 1), operands)
    else:
        tensors = choose(0, len(functions), operands)
    found: _Result = results.tree(new_values(tensors, tree_leaves(operands)))
    return found


def _probabilities_of(values: Sequence[float], count: int) -> list[float]:
    if not isinstance(values, Sequence) or len(values) != count:
        raise TraceError(
            f"{_CALL} at {where()}: probabilities must be a list of {count} numbers, one for each of branches (got "
            f"{values!r:.60})."
        )
    found = [probability_of(value, _CALL, f"probabilities[{number}]") for number, value in enumerate(values)]
    if not math.isclose(sum(found), 1.0, rel_tol=1e-6):
        raise TraceError(f"{_CALL} at {where()}: probabilities must add up to 1 (got {values!r:.60}).")
    return found
