"""Communication budgets: `comms="error"`, limits by kind of collective, and the error for a plan that exceeds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from spmd.collectives.primitives import KINDS
from spmd.core.quantity import parse_bytes
from spmd.errors import PlanError
from spmd.plan.cost.account import account
from spmd.plan.data.plan import PlanData

if TYPE_CHECKING:
    from spmd.inspect.questions.pins import Suggestion


@attrs.frozen
class Limit:
    """The limit of one kind of collective in a step: their number, and the bytes that a rank may send in them."""

    count: float = math.inf
    bytes: float = math.inf

    def excess(self, plan: PlanData, kind: str) -> float:
        """How many collectives of a kind, or bytes, are over the limit, whichever is more; 0 if none."""
        count, sent = _most(plan, kind)
        return max(0.0, count - self.count, sent - self.bytes)


@attrs.frozen
class Budget:
    """What a plan may send; kinds of collectives without a limit are unrestricted.

    Args:
        text: what the user wrote, as Python.
        limits: by kind of collective.
        fallbacks: whether operators without a rule may run replicated.
    """

    text: str
    limits: Mapping[str, Limit]
    fallbacks: bool = True

    def excess(self, plan: PlanData) -> float:
        """How far a plan is over the limits, in collectives or bytes; 0 if it is within them."""
        return sum(limit.excess(plan, kind) for kind, limit in self.limits.items())

    def check(self, plan: PlanData, name: str) -> None:
        """Check that a plan is within the budget.

        Args:
            plan: the plan.
            name: the function's name, for the message.

        Raises:
            PlanError: it does not; the message lists the offending collectives with their lines, the cheapest pin that
                avoids each (of a large program, each of the largest), and what all these pins cost together.
        """
        over = {kind: limit for kind, limit in self.limits.items() if limit.excess(plan, kind)}
        offending = [comm for comm in plan.comms if comm.kind in over]
        fallbacks = () if self.fallbacks else plan.fallbacks
        if not offending and not fallbacks:
            return
        from spmd.inspect.questions.pins import examined, suggest, together  # only for a plan over its budget

        found = suggest(plan, examined(plan, offending), self.excess)
        lines = [] if not self.fallbacks else [_total(plan, kind, limit) for kind, limit in over.items()]
        for comm in offending:
            lines.append(f"  {comm}")
            if id(comm) in found:
                lines.append(f"    {_remedy(found[id(comm)])}")
        lines += [f"  {o.op} has no sharding rule and runs replicated, at {o.source}" for o in fallbacks]
        every = together(plan, filter(None, found.values()), self.excess)
        if every is not None:
            lines.append(f"  {every}, {'within' if every.within else 'still over'} the budget")
        listed = "\n".join(lines)
        raise PlanError(
            f"comms={self.text} forbids what the plan of {name} does:\n{listed}\n"
            "  Change the specs or the function, give the operator a rule (rules=RULES | {op: rule}), or allow it: "
            "comms='allow'."
        )


def parse_budget(comms: Any) -> Budget:
    """The budget that a `comms=` option stands for.

    Args:
        comms: `"allow"`; `"error"`, which forbids every collective and operators without a rule; or a mapping from
            kinds of collectives to limits: an int is how many there may be, a text with a unit (`"20MB"`) how many
            bytes a rank may send in them in one step, by the ring algorithm.

    Raises:
        PlanError: `comms` is none of these.

    >>> budget = parse_budget({"all_gather": 0, "all_reduce": "20MB"})
    >>> budget.limits["all_gather"].count, budget.limits["all_reduce"].bytes
    (0, 20000000)
    """
    if comms == "allow":
        return Budget("'allow'", {})
    if comms == "error":
        return Budget("'error'", dict.fromkeys(KINDS, Limit(count=0)), fallbacks=False)
    if not isinstance(comms, Mapping):
        raise PlanError(
            "comms must be one of 'allow', 'error' or a mapping from kinds of collectives to limits, as "
            f"{{'all_gather': 0, 'all_reduce': '20MB'}} (got {comms!r})."
        )
    for kind in comms:
        if kind not in KINDS:
            raise PlanError(f"comms limits the kinds {', '.join(KINDS)} (got {kind!r}).")
    return Budget(str(dict(comms)), {kind: _limit(kind, amount) for kind, amount in comms.items()})


def _limit(kind: str, amount: Any) -> Limit:
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0:
        return Limit(count=amount)
    if isinstance(amount, str):
        return Limit(bytes=parse_bytes(amount, f"comms[{kind!r}]"))
    raise PlanError(
        f"comms[{kind!r}] must be how many there may be, as 0, or how many bytes they may send, as '20MB' "
        f"(got {amount!r})."
    )


def _most(plan: PlanData, kind: str) -> tuple[int, float]:
    """How many collectives of a kind a step has at most, and their bytes: of a branch, those of the larger side."""
    if not plan.graph.regions:
        found = [comm.bytes for comm in plan.comms if comm.kind == kind]
        return len(found), sum(found)
    sent = {o: [comm for comm in comms if comm.kind == kind] for o, comms in account(plan).comms.items()}
    counts = {operation: float(sum(comm.times for comm in comms)) for operation, comms in sent.items()}
    sizes = {operation: sum(comm.bytes for comm in comms) for operation, comms in sent.items()}
    return int(plan.graph.regions.most(counts)), plan.graph.regions.most(sizes)


def _total(plan: PlanData, kind: str, limit: Limit) -> str:
    count, sent = _most(plan, kind)
    allowed = f"{limit.bytes:,.0f} bytes" if limit.count == math.inf else f"{limit.count:,.0f}"
    return f"  {kind}: {count} with {sent:,.0f} bytes, allowed {allowed}:"


def _remedy(suggestion: Suggestion | None) -> str:
    return "no pin on either side avoids it" if suggestion is None else f"to avoid it, {suggestion}"
