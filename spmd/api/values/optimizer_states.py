"""States of optimizers that are loaded from plain tensors: they take the specs of their parameters."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeAlias

import optree
import torch

from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec, P

Replicate: TypeAlias = Callable[[str, Mapping[str, torch.Tensor], Mesh], Sequence[Any]]
"""`replicate(call, tensors, mesh)`: the DTensors of plain tensors, by name, that ranks compare in a call."""

_POLICY = torch.optim.Optimizer._process_value_according_to_param_policy.__code__
_LOAD = inspect.unwrap(torch.optim.Optimizer.load_state_dict).__code__
_HOOK = "_spmd_places_state"


def place_loaded_state(replicate: Replicate) -> None:
    """Let an optimizer place the state that it loads, if it is what asks a parameter whether it is floating.

    Plain tensors of the shape of their parameter get its spec, others of several elements are replicated.

    Args:
        replicate: makes DTensors of plain tensors.
    """
    frame: FrameType | None = sys._getframe(2)
    if frame is None or frame.f_code is not _POLICY:
        return
    while frame is not None and frame.f_code is not _LOAD:
        frame = frame.f_back
    if frame is not None and not hasattr(optimizer := frame.f_locals["self"], _HOOK):
        setattr(optimizer, _HOOK, optimizer.register_load_state_dict_post_hook(functools.partial(_place, replicate)))


def _place(replicate: Replicate, optimizer: torch.optim.Optimizer) -> None:
    """Place the state of an optimizer, once."""
    getattr(optimizer, _HOOK).remove()
    delattr(optimizer, _HOOK)
    waiting: dict[Mesh, list[tuple[str, torch.Tensor, P]]] = defaultdict(list)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        spec = getattr(parameter, "_spec", None)
        if not isinstance(spec, DTensorSpec):
            continue
        paths, leaves, _ = optree.tree_flatten_with_path(optimizer.state[parameter])  # type: ignore[arg-type]
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.numel() > 1 and not hasattr(leaf, "full_tensor"):
                name = f"{'.'.join(map(str, path))} of parameter {number}"
                waiting[spec.mesh].append((name, leaf, P(*spec.dims) if leaf.shape == spec.meta.shape else P()))
    placed: dict[int, Any] = {}
    for mesh, found in waiting.items():
        values = replicate(f"optimizer.load_state_dict on {mesh}", {name: leaf for name, leaf, _ in found}, mesh)
        placed |= {id(leaf): value.redistribute(spec) for value, (_, leaf, spec) in zip(values, found, strict=True)}
    for parameter in parameters if placed else ():
        held = optimizer.state[parameter]
        optimizer.state[parameter] = optree.tree_map(lambda leaf: placed.get(id(leaf), leaf), held)  # type: ignore[assignment]
