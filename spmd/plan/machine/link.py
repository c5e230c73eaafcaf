"""The cost constants of collectives along a mesh axis."""

from __future__ import annotations

from typing import Any

import attrs

from spmd.errors import PlanError
from spmd.ir.comm import StepKind


def _kind(kind: str) -> StepKind:
    kinds = [kind for kind in StepKind if kind.is_collective]
    if kind not in kinds:
        raise PlanError(f"The kind of a link must be one of {', '.join(kinds)} (got {kind!r:.80}).")
    return StepKind(kind)


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
        kind: the kind of collective, or its name.
        latency: seconds that a collective takes in addition to the transfer of its bytes.
        bandwidth: bytes per second that a rank sends, by ring algorithms (`Comm.bytes`).
        wait: seconds more until its result is there. They pass beside computation, and beside other collectives: ranks
            that share processors wait for each other's time slices.

    Raises:
        PlanError: an unknown kind, a bandwidth that is not positive, or a negative latency or wait.
    """

    axis: str
    kind: StepKind = attrs.field(converter=_kind)
    latency: float = attrs.field(validator=_check_seconds)
    bandwidth: float = attrs.field(validator=_check_bandwidth)
    wait: float = attrs.field(default=0.0, validator=_check_seconds)
