"""Loops and branches by the names of `jax.lax`: in a program where a function is traced, else as Python runs them.

Public functions flatten their pytrees and check them, here; `spmd.tracing.loops` makes operations of what is traced.
"""

from spmd.api.control_flow import torch_operators as torch_operators  # it says what torch's own are
