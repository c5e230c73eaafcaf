"""Plain tensors that are copied to DTensors: ranks compare the whole, and each takes its shard."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch

from spmd.api.values.distribute import check_same, place
from spmd.api.values.dtensor import DTensor
from spmd.collectives.distributed.agreement import spans_processes
from spmd.core.mesh import Mesh
from spmd.core.spec import TensorMeta
from spmd.errors import ShardingError
from spmd.tracing.source import where


def placed_as(target: DTensor, source: torch.Tensor) -> DTensor:
    """A plain tensor of more than one element under the spec of the DTensor that it is copied to.

    On a distributed mesh this is a collective call: ranks must have the same tensor. `load_state_dict` of a module
    compares all of its tensors at the first.

    Raises:
        ShardingError: autograd would record the copy.
        DivergenceError: ranks have other tensors.
    """
    if source.requires_grad and torch.is_grad_enabled():
        raise ShardingError(
            f"copy_ at {where()} has a plain tensor {TensorMeta.of(source)} that requires grad for a DTensor "
            f"{target._spec}. Copy under torch.no_grad(), or distribute it: spmd.distribute(x, spec, mesh)."
        )
    _compare(target.mesh, source)
    spec = target._spec.complete
    return place(source.to(spec.meta.dtype).expand(spec.meta.shape), spec, "the tensor that is copied")


_compared: ContextVar[tuple[weakref.ref[Any], Mesh] | None] = ContextVar("spmd_compared_load", default=None)


def _compare(mesh: Mesh, source: torch.Tensor) -> None:
    if not spans_processes(mesh):
        return
    state = _loaded_state()
    if state is None:
        check_same(f"copy_ of a plain tensor on {mesh}", mesh, ["The tensor that is copied"], [source])
        return
    last = _compared.get()
    if last is None or last[0]() is not state or last[1] != mesh:
        plain = {name: x for name, x in state.items() if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)}
        check_same(f"load_state_dict on {mesh}", mesh, list(plain), list(plain.values()))
        _compared.set((weakref.ref(state), mesh))


def _loaded_state() -> Mapping[str, Any] | None:
    """The state that `torch.nn.Module.load_state_dict` is loading; None if it does not run."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.nn.Module.load_state_dict.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["state_dict"]
