"""What a person asks of a finished plan: why, what else, how large, what differs; saving and loading it.

Imports `plan` and what is below it.
"""

from spmd.inspect.plan import Plan

__all__ = ["Plan"]
