"""Runtimes: what executes a local program."""

from spmd.runtime.virtual import VirtualProgram

__all__ = ["VirtualProgram"]
