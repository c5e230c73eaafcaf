"""Planning: from a program over global tensors to a spec for every value and a strategy for every operation.

Imports `tracing`, `rules` and what is below them; nothing here reads a finished plan for a person: see `inspect`.
"""

from spmd.plan.data.comm import Comm
from spmd.plan.data.plan import PlanData
from spmd.plan.data.request import Request
from spmd.plan.machine.machine import Machine
from spmd.plan.search.orders import plan

__all__ = ["Comm", "Machine", "PlanData", "Request", "plan"]
