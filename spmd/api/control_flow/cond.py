"""`cond`: one of two functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import TypeVarTuple, Unpack

from spmd.api.control_flow.branching import branch, probability_of
from spmd.api.control_flow.leaves import check_callable, device_of
from spmd.api.control_flow.new_values import new_values
from spmd.api.control_flow.predicates import boolean_scalar
from spmd.api.control_flow.results import Results
from spmd.api.control_flow.unwritten import called
from spmd.core.pytree import tree_leaves
from spmd.job.tracebacks import hides_internals_of_own_errors

_CALL = "spmd.cond"
_Operands = TypeVarTuple("_Operands")
_Result = TypeVar("_Result")


@hides_internals_of_own_errors
def cond(
    pred: bool | float | Tensor,
    true_fun: Callable[[Unpack[_Operands]], _Result],
    false_fun: Callable[[Unpack[_Operands]], _Result],
    *operands: Unpack[_Operands],
    probability: float | None = None,
) -> _Result:
    """Call `true_fun(*operands)` if a predicate is true, else `false_fun(*operands)`; `jax.lax.cond`.

    In a function under `jit` both are traced into one operation of the program, which runs one of them. Elsewhere
    Python calls one of them, and the host reads the predicate; if it is a bool of Python, both are traced first, to
    compare what they return. Under `vmap` a predicate that differs between examples selects from the results of both.
    In a shard_map body each rank decides by what it holds; where that varies along an axis, the functions may call no
    collective.

    Args:
        pred: a boolean scalar, or a number, which is true if it is not zero.
        true_fun: returns a pytree of tensors and numbers.
        false_fun: returns one of the same structure, shapes and dtypes.
        operands: arguments of both.
        probability: how likely the predicate is true. The planner weighs the times of both functions by it; by default
            each counts whole.

    Returns:
        What one of them returns, with numbers as tensors.

    Raises:
        TraceError: the predicate is no scalar, both functions do not return the like, or the probability is none.

    >>> import torch
    >>> cond(torch.tensor(2.0) > 1, torch.sin, torch.cos, torch.tensor(0.0))
    tensor(0.)
    """
    check_callable(_CALL, [("true_fun", true_fun), ("false_fun", false_fun)])
    predicate = boolean_scalar(pred, _CALL, "pred", numbers=True)
    likely = None if probability is None else probability_of(probability, _CALL, "probability")
    functions = [("true_fun", true_fun), ("false_fun", false_fun)]
    results = Results(_CALL, device_of(pred, operands))
    if isinstance(predicate, bool):
        results.compare_traces(functions, operands)
    on_true, on_false = (functools.partial(_call, results, name, f) for name, f in functions)
    tensors = branch(predicate, on_true, on_false, operands, _CALL, likely)
    found: _Result = results.tree(new_values(tensors, tree_leaves(operands)))
    return found


def _call(results: Results, name: str, function: Callable[..., Any], operands: tuple[Any, ...]) -> list[Tensor]:
    return results.tensors(called(function, *operands, call=_CALL, name=name), name)
