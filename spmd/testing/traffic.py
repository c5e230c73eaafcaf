"""Compares the collectives of a plan with those that ran."""

from __future__ import annotations

import itertools

from spmd.collectives.traffic import Traffic
from spmd.inspect.plan import Plan


def comms_differences(plan: Plan, traffic: Traffic) -> list[str]:
    """The differences between the collectives of a plan and those that one call of its program ran; [] if none.

    They are compared in order of execution: kind, mesh axes, and the most bytes that any rank sends.

    Args:
        plan: the plan of the call, `jitted.plan(*arguments)`.
        traffic: the result of `record_traffic` around the call, on a virtual mesh.

    Returns:
        One line of text for each difference.

    >>> comms_differences(jitted.plan(*arguments), traffic)  # doctest: +SKIP
    ['collective 0: planned all_gather over x, 60.0 bytes; ran all_gather over x, 56.0 bytes']
    """
    planned = [(comm.kind, comm.axes, float(comm.bytes)) for comm in plan.comms]
    ran = [(found.kind, found.axes, float(max(found.sent))) for found in traffic.transfers]
    return [
        f"collective {index}: planned {_text(expected)}; ran {_text(actual)}"
        for index, (expected, actual) in enumerate(itertools.zip_longest(planned, ran))
        if expected != actual
    ]


def _text(found: tuple[str, tuple[str, ...], float] | None) -> str:
    if found is None:
        return "nothing"
    kind, axes, sent = found
    return f"{kind} over {', '.join(axes)}, {sent:,} bytes"
