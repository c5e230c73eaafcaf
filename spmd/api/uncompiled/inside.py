"""Where a function runs on whole tensors, and when it has to run on every rank instead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch._C._functorch import get_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from spmd.api.uncompiled.ranks import run_on_ranks
from spmd.api.uncompiled.values import refuse_transformed
from spmd.core.mesh import Mesh, use_mesh
from spmd.core.pytree import tree_leaves
from spmd.ir.graph import iterate_leaves
from spmd.runtime.torch_settings import generator_state, set_generator_state
from spmd.tracing.linearize import RecordingError, recorder
from spmd.tracing.running import AsWritten, running, running_in
from spmd.tracing.source import where

T = TypeVar("T")


class _NeedsRanks(BaseException):
    """A function has to run on every rank from its start; no Exception, so that `except Exception` lets it pass."""


def is_inside() -> bool:
    """Whether a function runs on whole tensors here; one that it calls is a part of it."""
    return _around() is not None


def on_whole(mesh: Mesh, function: Callable[[], T]) -> T:
    """Call a function of whole tensors: here, or again on every rank where it transforms functions of `shard_map`.

    Args:
        mesh: the mesh.
        function: makes the same each time that it is called.
    """
    state = generator_state(mesh.device)
    with use_mesh(mesh), running_in(AsWritten(_transforms())), contextlib.suppress(_NeedsRanks), _Closures():
        return function()
    set_generator_state(state, mesh.device)
    return run_on_ranks(mesh, function)


def call_mapped(function: Callable[..., Any], args: Sequence[Any], mesh: Mesh) -> Any:
    """Call a function on every rank, from one that runs on whole tensors.

    Under transforms in that function the latter has to run on every rank: it is called again.
    """
    if recorder():
        raise RecordingError(
            f"A function under shard_map was called while make_fx records, at {where()}. Put spmd.jit outside of it."
        )
    leaves = tree_leaves(tuple(args))
    recorded = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
    if recorded or _transforms() != _around():
        raise _NeedsRanks
    return run_on_ranks(mesh, lambda: function(*args))


class _Closures(TorchFunctionMode):
    """Refuses tensors on which transforms from outside act: the function would run without these."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in iterate_leaves((args, kwargs or {})):
            refuse_transformed(leaf)
        return func(*args, **(kwargs or {}))


def _around() -> tuple[int, int] | None:
    """The transforms around the call of a function that runs on whole tensors, as `_transforms` counts them."""
    outer = running()
    return outer.transforms if isinstance(outer, AsWritten) else None


def _transforms() -> tuple[int, int]:
    """The number of transforms, and of levels of forward derivatives."""
    return len(get_interpreter_stack() or ()), forward_ad._current_level
