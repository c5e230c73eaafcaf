"""Writes to tensors that are not contiguous: they keep their strides, and draws that come later go by strides.

The functional form of an operator knows only what it reads: it gives the result strides of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmd.graph import map_leaves

aten = torch.ops.aten

_KEEPING = frozenset({aten.copy_.default, aten.resize_.default, aten.resize_as_.default})
_DRAWING_OR_VIEWING = frozenset({torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view})


def loses_strides(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to and that its functional form would give other strides."""
    written = [argument for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    if not written or func in _KEEPING or not _DRAWING_OR_VIEWING.isdisjoint(func.tags):
        return []
    if torch.Tag.pointwise in func.tags and not any(argument.kwarg_only for argument in written):
        return []  # the strides of the first operand, which is written to, come first
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    targets = [given.get(argument.name) for argument in written]
    return [t for t in targets if isinstance(t, torch.Tensor) and t.numel() and not t.is_contiguous()]


def write_copies(targets: Sequence[torch.Tensor], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Let an operator write to contiguous copies of `targets`, and copy these to them; gives its results."""
    copies = {id(target): target.clone(memory_format=torch.contiguous_format) for target in targets}
    originals = {id(copies[id(target)]): target for target in targets}
    args, kwargs = (map_leaves(lambda leaf: copies.get(id(leaf), leaf), given) for given in (args, dict(kwargs)))
    result = func(*args, **kwargs)
    for target in targets:
        target.copy_(copies[id(target)])
    return map_leaves(lambda leaf: originals.get(id(leaf), leaf), result)
