"""Loops and branches in a trace: each body is traced once, and becomes a region of the program (`spmd.ir.regions`)."""

from __future__ import annotations

from spmd.tracing.loops.calls import traced_cond, traced_scan, traced_while

__all__ = ["traced_cond", "traced_scan", "traced_while"]
