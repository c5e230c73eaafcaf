"""Runtimes: what executes a local program."""

from spmd.runtime.distributed import DistributedProgram
from spmd.runtime.virtual import VirtualProgram

__all__ = ["DistributedProgram", "VirtualProgram"]
