"""What reports say in words: partial specs, and the figures of a machine."""

from __future__ import annotations

import ast
import re

from spmd.core.quantity import size_text, time_text
from spmd.plan.machine.machine import GIVEN, Machine

_PARTIAL = re.compile(r"P\(((?:[^()]|\([^()]*\))*?)(?:, )?partial=(\{[^}]*\})\)")
"""A spec in which a reduction is pending."""


def in_words(text: str) -> str:
    """A text with partial specs in words.

    >>> in_words("mm produces P('data', partial={'model': 'sum'}), relu requires P('data')")
    "mm produces P('data') and a partial sum over model, relu requires P('data')"
    """
    return _PARTIAL.sub(_partial, text)


def _partial(match: re.Match[str]) -> str:
    pending = ast.literal_eval(match[2])
    words = f"a partial {next(iter(pending.values()))} over {', '.join(pending)}"
    return f"P({match[1]}) and {words}" if match[1] else words


def machine_figures(machine: Machine) -> dict[str, str]:
    """The figures of a machine, formatted, by name."""
    return {
        "made for": machine.origin or GIVEN,
        "arithmetic": _flops(machine.flops),
        **{f"arithmetic in {dtype}": _flops(rate) for dtype, rate in machine.dtype_flops},
        "memory": f"{size_text(machine.memory_bandwidth)}/s"
        + (f", {size_text(machine.memory_capacity)}" if machine.memory_capacity else ""),
        "links": f"{size_text(machine.link_bandwidth)}/s",
        **{f"links along {axis}": f"{size_text(rate)}/s" for axis, rate in machine.axis_bandwidth},
        "a collective takes besides": time_text(machine.latency),
        **{f"a collective along {axis} takes besides": time_text(seconds) for axis, seconds in machine.axis_latency},
        **{
            f"{link.kind} along {link.axis}": f"{size_text(link.bandwidth)}/s and {time_text(link.latency)}"
            + (f", {time_text(link.wait)} more until its result is there" if link.wait else "")
            for link in machine.links
        },
        "an operator takes besides": time_text(machine.operator_latency),
        "a tanh in a gelu": time_text(machine.transcendental_seconds),
        "of communication that is started early, hidden": f"{100 * machine.overlap:.0f}%",
        "of memory traffic, hidden by arithmetic": f"{100 * machine.memory_overlap:.0f}%",
        "memory that a new result passes": "twice, because it is read first" if machine.write_allocate else "once",
        "values between pointwise operators": "cost no memory traffic" if machine.fuses else "cost memory traffic",
    }


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.4g} Tflop/s" if rate >= 1e12 else f"{rate / 1e9:,.3g} Gflop/s"
