"""The plan that users see: the planner's decisions, with methods to inspect, compare, save and load it."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING

import attrs

from spmd.ir.graph import Operation, Value
from spmd.plan.cost.account import account
from spmd.plan.cost.suspicious_moves import SuspiciousMove, suspicious_moves
from spmd.plan.data.plan import PlanData
from spmd.plan.data.request import Request
from spmd.plan.memory.peak import Memory, memory_of
from spmd.plan.schedule.choice import best_schedule

if TYPE_CHECKING:
    from spmd.inspect.layers.layers import RepeatedLayers
    from spmd.inspect.questions.difference import Difference
    from spmd.inspect.questions.explain import Explanation
    from spmd.inspect.report.figures import PlanFigures
    from spmd.inspect.saving.document import Document
    from spmd.plan.schedule.timing import Timing

# What answers a question is imported with the first question: most programs ask none, and import time counts.


@attrs.frozen(eq=False, repr=False)
class Plan(PlanData):
    """How a program runs on a mesh: the fields are those of `PlanData`."""

    @classmethod
    def of(cls, data: PlanData) -> Plan:
        """The plan with the same fields as `data`."""
        return cls(**attrs.asdict(data, recurse=False))

    def explain(self, what: str | Value | Operation, *, exact: bool = False) -> Explanation:
        """Explain the sharding of a value: alternatives and their costs, specs required by neighbours, given specs.

        Args:
            what: the name of a value in `print(plan)`, the path of an argument (`0.params['w']`), a value, or an
                operation, which stands for its first result.
            exact: also replan each mesh axis with every alternative fixed, for exact differences in seconds and bytes.
                By default an alternative is priced with all other choices as planned.

        Raises:
            PlanError: the plan has no such value; the message lists similar names.
        """
        from spmd.inspect.questions.explain import explain

        return explain(self, what, exact=exact)

    def diff(self, other: Plan) -> Difference:
        """How another plan differs from this one: values that are sharded differently, collectives, and total costs."""
        from spmd.inspect.questions.difference import difference

        return difference(self, other)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as human-readable JSON; equal plans produce equal bytes.

        `jit(..., plan=path)` runs the same program with this plan, without a search.
        """
        from spmd.inspect.saving.document import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], request: Request, own_machine: bool = False) -> Plan:
        """Load a plan for a request with the same program, mesh axes and specs.

        Args:
            path: the file.
            request: the request.
            own_machine: whether the plan keeps the machine that it was made for, and not that of the request.

        Raises:
            PlanError: the file is not a plan, or is one for another program, mesh or specs.
        """
        from spmd.inspect.saving.document import read

        return cls._restored(read(path), request, own_machine)

    def transfer(self, request: Request, own_machine: bool = False) -> Plan:
        """This plan for a request with the same program, mesh axes and specs, such as one for another runtime.

        Args:
            request: the request.
            own_machine: as for `load`.

        Raises:
            PlanError: the request has another program, mesh axes or specs.
        """
        from spmd.inspect.saving.document import make_document

        return self._restored(make_document(self), request, own_machine)

    @classmethod
    def _restored(cls, document: Document, request: Request, own_machine: bool) -> Plan:
        from spmd.inspect.saving.document import saved_machine
        from spmd.inspect.saving.restore import restore

        saved, here = saved_machine(document), request.machine
        if saved != here:
            kept = "its figures are for the former" if own_machine else "its figures are for the latter"
            note = f"made for another machine, {saved}; here it is {here}; {kept}"
            request = attrs.evolve(request, machine=saved if own_machine else here, made_elsewhere=note)
        parts = attrs.asdict(restore(document, request), recurse=False)
        schedule = request.machine.launch_schedule
        plan = cls(request=request, mesh=request.mesh, seconds=0.0, comms=(), schedule=schedule, **parts)
        found = account(plan)
        return best_schedule(attrs.evolve(plan, comms=found.all_comms, seconds=found.total)).verify()

    @property
    def memory(self) -> Memory:
        """The peak memory of a rank in bytes, the operation at which it is reached, and the tensors held then."""
        return memory_of(self)

    @cached_property
    def timing(self) -> Timing:
        """The predicted time of a step on processes, and the part of its communication that is exposed."""
        from spmd.plan.schedule.timing import timing_of

        return timing_of(self)

    @cached_property
    def suspicious_moves(self) -> tuple[SuspiciousMove, ...]:
        """The collectives that move more than four times what comes of it, each with its line and what to do.

        They send more than a megabyte, and those of one line take at least a twentieth of the plan's time.
        """
        return suspicious_moves(self, account(self))

    @cached_property
    def layers(self) -> tuple[RepeatedLayers, ...]:
        """The repeated parts of the program, such as equal layers, and which copies are sharded identically."""
        from spmd.inspect.layers.layers import find_layers

        return find_layers(self, account(self))

    def __str__(self) -> str:
        moves = [f"# suspicious: {move}".replace("\n", "\n#") for move in self.suspicious_moves]
        return "\n".join([PlanData.__str__(self), *moves])

    def to_html(self) -> str:
        """The plan's figures as a self-contained HTML page: summary, timeline, layers, lines, collectives."""
        from spmd.inspect.report.html import render_page

        return render_page(self._report)

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows."""
        from spmd.inspect.report.html import render_fragment

        return render_fragment(self._report)

    @property
    def _report(self) -> PlanFigures:
        from spmd.inspect.report.figures import make_report
        from spmd.inspect.saving.document import make_document

        return make_report(make_document(self))
