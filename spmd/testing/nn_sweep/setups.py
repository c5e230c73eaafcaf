"""What the sweep runs of each module and function."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs


@attrs.frozen
class Setup:
    """What is run of every module and function.

    Args:
        mesh: the axes of the virtual mesh.
        training: the mode of modules; functions are run in one of them.
        backward: with the gradients, by `torch.func.vjp`.
        calls: how many, at most, of those of torch's database; all that are made by hand are run.
        extra: how many placements of each call beside the usual ones.
        memory: with inputs whose memory is not contiguous, through `spmd.jit`.
        dtype: of floating tensors, by its name in torch.
    """

    mesh: Mapping[str, int]
    training: bool = False
    backward: bool = False
    calls: int = 6
    extra: int = 3
    memory: bool = False
    dtype: str = "float64"


SETUPS: Mapping[str, Setup] = MappingProxyType(
    {
        "train": Setup({"x": 4}, training=True),
        "train-backward": Setup({"x": 4}, training=True, backward=True),
        "eval": Setup({"x": 4}, extra=1),
        "eval-backward": Setup({"x": 4}, backward=True, calls=3, extra=1),
        "grid": Setup({"x": 2, "y": 2}, calls=2, extra=1),
        "grid-backward": Setup({"x": 2, "y": 2}, training=True, backward=True, calls=2, extra=1),
        "single": Setup({"x": 4}, calls=3, extra=1, dtype="float32"),
        "single-backward": Setup({"x": 4}, training=True, backward=True, calls=3, extra=1, dtype="float32"),
        "memory": Setup({"x": 4}, calls=2, memory=True, dtype="float32"),
        "memory-backward": Setup({"x": 4}, training=True, backward=True, calls=2, memory=True, dtype="float32"),
    }
)
"""The sweeps that `make test-rules` runs, by name."""
