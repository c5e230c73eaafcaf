"""The setups of the sweeps: the mesh, the calls of each entry, and the placements of each call."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs


@attrs.frozen
class Setup:
    """What is run of every entry.

    Args:
        mesh: the axes of the virtual mesh.
        samples: the number of calls per entry.
        limit: the most combinations of placements per call; if there are more, replication and a fixed sample of them.
        partial: also try partial operands.
        backward: compare gradients too, by `torch.func.vjp`.
        lengths: run the calls in which a dim has a length that no earlier call has, in place of the first calls.
        layouts: give operands non-contiguous memory layouts, different ones for each call.
        eager: call the operators on DTensors outside of `jit`; gradients are by `.backward()`.
        make_fx: also check for every call whether torch's `make_fx` traces it.
        device: where the virtual ranks are.
    """

    mesh: Mapping[str, int]
    samples: int = 6
    limit: int = 200
    partial: bool = False
    backward: bool = False
    lengths: bool = False
    layouts: bool = False
    eager: bool = False
    make_fx: bool = False
    device: str = "cpu"


SETUPS: Mapping[str, Setup] = MappingProxyType(
    {
        "forward": Setup({"x": 4}, make_fx=True),
        "backward": Setup({"x": 4}, limit=8, backward=True),
        "lengths": Setup({"x": 4}, limit=8, lengths=True),
        "grid": Setup({"x": 2, "y": 2}, samples=3, limit=8),
        "grid-backward": Setup({"x": 2, "y": 2}, samples=2, limit=4, backward=True),
        "partial": Setup({"x": 4}, samples=4, limit=6, partial=True),
        "grid-partial": Setup({"x": 2, "y": 2}, samples=2, limit=6, partial=True),
        "layouts": Setup({"x": 4}, samples=8, limit=2, layouts=True),
        "layouts-backward": Setup({"x": 4}, samples=4, limit=2, backward=True, layouts=True),
        "eager": Setup({"x": 4}, samples=4, limit=6, eager=True),
        "eager-backward": Setup({"x": 4}, samples=2, limit=4, backward=True, eager=True),
        "eager-grid": Setup({"x": 2, "y": 2}, samples=2, limit=4, partial=True, eager=True),
    }
)
"""The sweeps that `make test-rules` runs, by name."""
