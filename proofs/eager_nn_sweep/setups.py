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
        training: the mode of modules.
        calls: the most calls from torch's databases; all handwritten calls are run.
        placements: the most placements per call.
        dtype: the dtype of floating tensors, by its name in torch.
    """

    mesh: Mapping[str, int]
    training: bool = True
    calls: int = 1
    placements: int = 2
    dtype: str = "float64"


SETUPS: Mapping[str, Setup] = MappingProxyType(
    {
        "train": Setup({"x": 4}),
        "eval": Setup({"x": 2, "y": 2}, training=False, calls=1, placements=1),
    }
)
"""The sweeps by name."""
