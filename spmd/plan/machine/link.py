"""The cost constants of collectives along a mesh axis."""

from __future__ import annotations

from typing import Any

import attrs

from spmd.collectives.primitives import KINDS
from spmd.errors import PlanError


def _check_kind(_: Any, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in list(KINDS):
        raise PlanError(f"The kind of a link must be one of {', '.join(KINDS)} (got {value!r:.80}).")


def _check_bandwidth(_: Any, attribute: attrs.Attribute[float], value: float) -> None:
    if not value > 0:
        raise PlanError(f"The bandwidth of a link must be positive (got {value!r}).")


def _check_seconds(_: Any, attribute: attrs.Attribute[float], value: float) -> None:
    if not value >= 0:
        raise PlanError(f"The {attribute.name} of a link must not be negative (got {value!r}).")


@attrs.frozen(order=True)
class Link:
    """The cost constants of collectives of one kind along one mesh axis.

    Args:
        axis: the name of the axis.
        kind: the name of the kind of collective.
        latency: seconds that a collective takes in addition to the transfer of its bytes.
        bandwidth: bytes per second that a rank sends, by ring algorithms (`Comm.bytes`).
        wait: seconds more until its result is there. They pass beside computation, and beside other collectives: ranks
            that share processors wait for each other's time slices.

    Raises:
        PlanError: an unknown kind, a bandwidth that is not positive, or a negative latency or wait.
    """

    axis: str
    kind: str = attrs.field(validator=_check_kind)
    latency: float = attrs.field(validator=_check_seconds)
    bandwidth: float = attrs.field(validator=_check_bandwidth)
    wait: float = attrs.field(default=0.0, validator=_check_seconds)
