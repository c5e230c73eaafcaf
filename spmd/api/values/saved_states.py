"""States that transformers saves: it reads storages, so the DTensors of a state are assembled when it asks for one."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_MODULE, _SAVED = "transformers.modeling_utils", "_saved"


def saved_storage(value: Any, assemble: Callable[[Any], torch.Tensor]) -> torch.UntypedStorage | None:
    """The storage of the global tensor of a DTensor that `save_pretrained` saves; None if that does not run.

    All DTensors of its state become global tensors on the CPU, tied ones the same. On a distributed mesh this is a
    collective call.

    Args:
        value: the DTensor, which is in the state.
        assemble: makes the global tensor of a DTensor.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_globals.get("__name__") == _MODULE and "state_dict" in frame.f_locals):
        frame = frame.f_back
    state = {} if frame is None else frame.f_locals["state_dict"]
    if any(held is value for held in state.values()):
        whole: dict[tuple[int, ...], torch.Tensor] = {}
        for name, held in state.items():
            if isinstance(held, type(value)):
                key = tuple(map(id, held._shards))
                state[name] = whole[key] if key in whole else whole.setdefault(key, assemble(held).cpu())
                held.__dict__[_SAVED] = weakref.ref(state[name])
    saved = value.__dict__[_SAVED]() if frame is not None and _SAVED in value.__dict__ else None
    return None if saved is None else saved.untyped_storage()
