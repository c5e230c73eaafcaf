"""The names that the user's code has for a tensor which a traced function closes over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch import nn

from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.job.user_code import is_user_file

_REMEDIES = {
    "parameter": "Load it (load_state_dict with assign=True), or make the module outside of torch.device('meta').",
    "buffer": "Assign it, or make the module outside of torch.device('meta'): a checkpoint has no buffers that are "
    "registered with persistent=False.",
    "attribute": "Assign it, or register it as a buffer: a checkpoint leaves other attributes out.",
    "variable": "Make it on another device.",
}


def without_values(tensor: torch.Tensor, where: str) -> TraceError:
    """The error for a tensor on the meta device that is used at a line, and is no argument."""
    kind, name, module = _name_of(tensor) or ("variable", "", "")
    named = f"{kind.capitalize()} `{name}` {TensorMeta.of(tensor)}" if name else f"A tensor {TensorMeta.of(tensor)}"
    closed = "" if kind == "attribute" else "closed-over "  # an attribute is no argument where its module is one
    return TraceError(
        f"{named}{f' of the {closed}module {module}' if module else ''} is on meta and has no values, at {where}. "
        f"{_REMEDIES[kind]} To plan without values, pass {'the module' if module else 'it'} as an argument: .trace, "
        ".plan and .lower take tensors on meta."
    )


def _name_of(tensor: torch.Tensor) -> tuple[str, str, str] | None:
    """The kind of a tensor (a key of `_REMEDIES`), its name, and its module's class.

    The module is the outermost one that code on the stack knows.
    """
    variable = in_module = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for name, value in (*frame.f_locals.items(), *frame.f_globals.items()):
            if isinstance(value, nn.Module):
                in_module = next(_places(value, tensor), in_module)
            elif value is tensor and is_user_file(frame.f_code.co_filename):
                variable = variable or ("variable", name, "")
        frame = frame.f_back
    return in_module or variable


def _places(module: nn.Module, tensor: torch.Tensor) -> Iterator[tuple[str, str, str]]:
    for path, owner in module.named_modules():
        held = {"parameter": owner._parameters, "buffer": owner._buffers, "attribute": vars(owner)}
        for kind, items in held.items():
            for name, value in items.items():
                if value is tensor:
                    yield kind, f"{path}.{name}" if path else name, type(module).__name__
