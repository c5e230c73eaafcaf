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
        training: the mode of modules; functions are run in one mode only.
        backward: compare gradients too, by `torch.func.vjp`.
        calls: the most calls from torch's database; all handwritten calls are run.
        placements: the most placements per call.
        memory: run with non-contiguous inputs, through `spmd.jit`.
        dtype: the dtype of floating tensors, by its name in torch.
    """

    mesh: Mapping[str, int]
    training: bool = False
    backward: bool = True
    calls: int = 2
    placements: int = 3
    memory: bool = False
    dtype: str = "float64"


SETUPS: Mapping[str, Setup] = MappingProxyType(
    {
        "train": Setup({"x": 4}, training=True),
        "eval": Setup({"x": 4}),
        "inference": Setup({"x": 4}, backward=False, dtype="float32"),
        "grid": Setup({"x": 2, "y": 2}, training=True, calls=1, dtype="float32"),
        "memory": Setup({"x": 4}, training=True, calls=1, memory=True, dtype="float32"),
    }
)
"""The sweeps that `make test-rules` runs, by name. Without gradients, some modules run other kernels."""
