"""In-place and `out=` writes to tensors that are not contiguous: the tensors must keep their strides.

Random operators draw in the order of strides, so strides affect numbers. The functional form of an operator does not
know the strides of the tensor that is written to, and its result may have others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmd.errors import TraceError
from spmd.ir.graph import iterate_leaves, map_leaves
from spmd.tracing.source import where

aten = torch.ops.aten

_DRAWING_OR_VIEWING = frozenset({torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view})


def loses_strides(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes to and whose strides its functional form could change."""
    keeping = func is aten.copy_.default or not _DRAWING_OR_VIEWING.isdisjoint(func.tags)
    if keeping or not func._schema.is_mutable:
        return []
    written = [argument for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    named = (given.get(argument.name) for argument in written)
    targets = [target for target in named if isinstance(target, torch.Tensor) and target.numel()]
    if written[0].kwarg_only:  # out=: the functional form takes the strides of the operands
        return targets if any(map(_is_strided, iterate_leaves((*args, *kwargs.values())))) else []
    # In place, a pointwise operator takes the strides of its first operand, which is the one that is written to.
    return [] if torch.Tag.pointwise in func.tags else list(filter(_is_strided, targets))


def _is_strided(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_contiguous()


def write_copies(targets: Sequence[torch.Tensor], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator with contiguous copies in place of `targets`, and copy the copies back.

    Returns:
        The operator's results, with `targets` where it returns the copies.

    Raises:
        TraceError: a result has another shape than its `out=`.
    """
    outs = {id(leaf) for leaf in kwargs.values()}
    copies = {
        id(target): target.new_empty(0) if id(target) in outs else target.clone(memory_format=torch.contiguous_format)
        for target in targets
    }
    originals = {id(copies[id(target)]): target for target in targets}
    args, kwargs = (map_leaves(lambda leaf: copies.get(id(leaf), leaf), given) for given in (args, dict(kwargs)))
    result = func(*args, **kwargs)
    for target in targets:
        check_out(func, copies[id(target)].shape, target)
        target.copy_(copies[id(target)])
    return map_leaves(lambda leaf: originals.get(id(leaf), leaf), result)


def check_out(func: Any, shape: torch.Size, target: torch.Tensor) -> None:
    """Raise TraceError if the shape of a result is not that of its `out=` tensor `target`."""
    if shape != target.shape:
        raise TraceError(
            f"{func} at {where()} has a result of shape {list(shape)} for out= of shape {list(target.shape)}. Give it "
            "a tensor of the result's shape, or an empty one: torch.empty(0)."
        )
