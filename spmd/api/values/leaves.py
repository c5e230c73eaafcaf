"""What the arguments of a jitted function are that are no tensors: floats, which are dynamic, and static values."""

from __future__ import annotations

from typing import Any

import torch

from spmd.core.spec import has_meta
from spmd.core.static_key import static_key
from spmd.core.value_types import CONSTANTS

DYNAMIC = "a number"
"""The key of a float."""


def as_argument(leaf: Any) -> Any:
    """A leaf as the function gets it: arrays of numpy as tensors, which are copies, and its scalars as Python's."""
    if type(leaf).__module__ != "numpy" or not hasattr(leaf, "item"):
        return float(leaf) if isinstance(leaf, float) else leaf
    if not leaf.shape and not hasattr(leaf, "__setitem__"):
        return leaf.item()
    try:
        return torch.from_numpy(leaf.copy())
    except TypeError:  # no dtype of torch
        return leaf


def key_of(leaf: Any) -> Any:
    """The part of a signature that a leaf makes which is no tensor: the value of a static one; None for a tensor."""
    if isinstance(leaf, float):
        return DYNAMIC
    return static_key(leaf) if isinstance(leaf, CONSTANTS) and not has_meta(leaf) else None
