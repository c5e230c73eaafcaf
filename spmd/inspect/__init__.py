"""Inspection of a finished plan: explanations, budgets, differences, layers and reports; saving and loading it.

Imports `plan` and what is below it.
"""

from spmd.inspect.plan import Plan

__all__ = ["Plan"]
