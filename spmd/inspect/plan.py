"""The plan that users hold: what was decided, and what a person asks of it."""

from __future__ import annotations

import os
from functools import cached_property

import attrs

from spmd.inspect.layers.layers import Layers, find_layers
from spmd.inspect.questions.difference import Difference, difference
from spmd.inspect.questions.explain import Explanation, explain
from spmd.inspect.report.figures import make_report
from spmd.inspect.report.html import render_fragment, render_page
from spmd.inspect.saving.document import Document, make_document, read, save
from spmd.inspect.saving.restore import restore
from spmd.ir.graph import Operation, Value
from spmd.plan.cost.account import account
from spmd.plan.data.plan import PlanData
from spmd.plan.data.request import Request
from spmd.plan.memory.peak import Memory, memory_of


@attrs.frozen(eq=False, repr=False)
class Plan(PlanData):
    """How a program runs on a mesh: the fields are those of `PlanData`."""

    @classmethod
    def of(cls, data: PlanData) -> Plan:
        """What the planner has decided, with the questions that can be asked of it."""
        return cls(**attrs.asdict(data, recurse=False))

    def explain(self, what: str | Value | Operation, *, exact: bool = False) -> Explanation:
        """Why a value lies as it does: the alternatives and their cost, what its neighbours want, what is given.

        Args:
            what: a value by its name in `print(plan)`, an argument also by its path (`0.params['w']`), a value, or an
                operation, of which the first result is meant.
            exact: also plan each mesh axis anew around every alternative, for true differences in seconds and bytes.

        Raises:
            PlanError: the plan has no such value; says which names are close.
        """
        return explain(self, what, exact=exact)

    def diff(self, other: Plan) -> Difference:
        """What another plan does otherwise: values that lie otherwise, collectives, seconds, bytes, memory."""
        return difference(self, other)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON that a person can read; equal plans give equal bytes.

        `jit(..., plan=path)` runs the same program by it without a search.
        """
        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], request: Request) -> Plan:
        """The plan in a file, for a request that asks for the same.

        Raises:
            PlanError: the file is no plan, or one for another program, mesh or specs.
        """
        return cls._restored(read(path), request)

    def transfer(self, request: Request) -> Plan:
        """This plan for another request that asks for the same, as on a mesh of another runtime.

        Raises:
            PlanError: the request has another program, mesh axes or specs.
        """
        return self._restored(make_document(self), request)

    @classmethod
    def _restored(cls, document: Document, request: Request) -> Plan:
        parts = attrs.asdict(restore(document, request), recurse=False)
        plan = cls(request=request, mesh=request.mesh, seconds=0.0, comms=(), **parts)
        found = account(plan)
        return attrs.evolve(plan, comms=found.all_comms, seconds=found.total).verify()

    @property
    def memory(self) -> Memory:
        """The bytes that a rank holds at once: the peak, where it is, and what is held there."""
        return memory_of(self)

    @cached_property
    def layers(self) -> tuple[Layers, ...]:
        """The stretches of the program that repeat, as equal layers do, and which of the copies lie identically."""
        return find_layers(self, account(self))

    def to_html(self) -> str:
        """The plan's figures as a self-contained page: summary, timeline, layers, collectives."""
        return render_page(make_report(make_document(self)))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return render_fragment(make_report(make_document(self)))
