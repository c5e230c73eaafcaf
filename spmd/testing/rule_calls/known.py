"""Rows that are right and missing, and why."""

from __future__ import annotations

from collections.abc import Mapping

from spmd.rules.check import Finding

UNKNOWN = "not known"

KNOWN: Mapping[str, Mapping[str, tuple[str, ...]]] = {}
"""By reason and operator, the rows."""


def reason_of(op: str, finding: Finding) -> str:
    """Why a row is missing; `UNKNOWN` if nobody has said so."""
    return next((reason for reason, ops in KNOWN.items() if finding.row in ops.get(op, ())), UNKNOWN)
