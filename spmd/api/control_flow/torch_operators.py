"""Torch's own loops and branches, such as `torch.cond`: ours, in a trace and on DTensors.

Torch's public functions flatten their pytrees, and let torch.compile compile a call of an operator. In a trace it is
called as it stands (`spmd.tracing.nested_tracers`), and so it is on DTensors, here, which dynamo cannot trace. The
operator takes flat lists of tensors, of which the last is what compiled functions close over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch._higher_order_ops import utils
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from spmd.api.control_flow.associative_scan import associative_scan
from spmd.api.control_flow.cond import cond
from spmd.api.control_flow.map import map
from spmd.api.control_flow.scan import scan
from spmd.api.control_flow.while_loop import while_loop
from spmd.api.values.dtensor import DTensor
from spmd.tracing.active_transforms import unwrapped
from spmd.tracing.higher_order import meaning_of, means


@means("cond")
def _cond(pred: Any, on_true: Callable[..., Any], on_false: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """`torch.cond`, whose predicate may have dims of length 1."""
    return cond(pred.reshape(()) if isinstance(pred, Tensor) else pred, on_true, on_false, *operands)


@means("while_loop")
def _while_loop(
    condition: Callable[..., Any], body: Callable[..., Any], carry: Sequence[Any], others: Sequence[Any]
) -> Any:
    """`torch._higher_order_ops.while_loop`."""
    return while_loop(
        lambda values: condition(*values, *others),
        lambda values: tuple(tree_leaves(body(*values, *others))),
        tuple(carry),
    )


@means("scan")
def _scan(combine: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], others: Sequence[Any]) -> Any:
    """`torch._higher_order_ops.scan`: the last carry has the structure that `combine` returns."""
    structures = []

    def trip(carry: Sequence[Tensor], x: Sequence[Tensor]) -> tuple[Any, Any]:
        after, y = combine(*carry, *x, *others)
        leaves, structure = tree_flatten(after)
        structures.append(structure)
        return tuple(leaves), y

    carry, ys = scan(trip, tuple(init), tuple(xs))
    return tree_unflatten(carry, structures[0]), ys


@means("associative_scan")
def _associative_scan(combine: Callable[..., Any], xs: Sequence[Tensor], others: Sequence[Any]) -> Any:
    """`torch._higher_order_ops.associative_scan` of an operation on single elements."""
    return associative_scan(lambda a, b: tuple(tree_leaves(combine(*a, *b, *others))), tuple(xs))


@means("map_impl")
def _map(f: Callable[..., Any], xs: Sequence[Tensor], others: Sequence[Any]) -> Any:
    """`torch._higher_order_ops.map`."""
    return map(lambda x: f(*x, *others), tuple(xs))


class _Meanings(TorchFunctionMode):
    """Calls what operators that take functions mean."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meaning = meaning_of(func) if isinstance(func, torch._ops.HigherOrderOperator) else None
        return (meaning or func)(*args, **(kwargs or {}))


@attrs.frozen
class _CompiledCall:
    """Torch's call of an operator that takes functions: compiled, but for one on DTensors."""

    torchs: Callable[..., Any]

    def __call__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any = None) -> Any:
        if not any(isinstance(unwrapped(leaf), DTensor) for leaf in tree_leaves((args, kwargs))):
            return self.torchs(function, args, kwargs)
        with _Meanings():
            return function(*args, **(kwargs or {}))


if hasattr(utils, "_hop_compile_and_call"):  # torch 2.11 compiles in each of its functions
    utils._hop_compile_and_call = _CompiledCall(utils._hop_compile_and_call)
