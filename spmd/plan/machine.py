"""What a machine costs: the constants behind predicted times."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from spmd.errors import PlanError


def _freeze_links(links: Mapping[str, float] | tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(links.items() if isinstance(links, Mapping) else links))


@attrs.frozen
class Machine:
    """Cost constants of one rank and its links; the defaults resemble an H100 in one node.

    Args:
        flops: floating-point operations a second.
        memory_bandwidth: bytes a second between the rank's memory and its compute units.
        link_bandwidth: bytes a second that a rank can send.
        axis_bandwidth: bytes a second along mesh axes whose links differ from `link_bandwidth`, by axis name.
        latency: seconds that each collective takes besides its bytes. The default is that of collectives in buckets;
            a single small one takes ten times as long.

    Raises:
        PlanError: a constant that is not positive (a latency may be zero).
    """

    flops: float = 5e14
    memory_bandwidth: float = 3e12
    link_bandwidth: float = 4e11
    axis_bandwidth: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=_freeze_links)
    latency: float = 0.5e-6

    def __attrs_post_init__(self) -> None:
        rates = {"flops": self.flops, "memory_bandwidth": self.memory_bandwidth, "link_bandwidth": self.link_bandwidth}
        rates |= {f"axis_bandwidth[{axis!r}]": rate for axis, rate in self.axis_bandwidth}
        for name, rate in rates.items():
            if not rate > 0:
                raise PlanError(f"Machine {name} must be positive (got {rate!r}).")
        if not self.latency >= 0:
            raise PlanError(f"Machine latency must not be negative (got {self.latency!r}).")

    def compute_seconds(self, flops: float, bytes: float) -> float:
        """Roofline time of an operator (Williams et al., 2009): the longer of its arithmetic and its memory traffic."""
        return max(flops / self.flops, bytes / self.memory_bandwidth)

    def collective_seconds(self, axes: tuple[str, ...], bytes: float) -> float:
        """Time of a collective over `axes` in which each rank sends `bytes`."""
        rates = dict(self.axis_bandwidth)
        return self.latency + bytes / min(rates.get(axis, self.link_bandwidth) for axis in axes)
