"""Planning: from a program over global tensors to a spec for every value and a strategy for every operation.

Imports `tracing`, `rules` and the packages below them. Reports about finished plans are in `spmd.inspect`.
"""

from spmd.ir.comm import Comm
from spmd.plan.data.plan import PlanData
from spmd.plan.data.request import Request
from spmd.plan.machine.machine import Machine
from spmd.plan.search.orders import plan

__all__ = ["Comm", "Machine", "PlanData", "Request", "plan"]
