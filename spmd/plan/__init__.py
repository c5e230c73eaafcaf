"""Planning: from a program over global tensors to a spec for every value and a strategy for every operation."""

from spmd.plan.comm import Comm
from spmd.plan.plan import Plan
from spmd.plan.pricing.machine import Machine
from spmd.plan.request import Request
from spmd.plan.search.orders import plan

__all__ = ["Comm", "Machine", "Plan", "Request", "plan"]
