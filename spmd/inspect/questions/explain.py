"""Explains the sharding of a value: its producer's alternatives, specs required by its neighbours, given specs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import attrs

from spmd.core.argument_paths import find_inputs
from spmd.core.spec import DTensorSpec
from spmd.errors import PlanError
from spmd.inspect.questions.explain_axis import AxisExplainer
from spmd.inspect.questions.explanation import Explanation
from spmd.inspect.questions.given_specs import pins_of, producer_of
from spmd.inspect.questions.replay import Replay, replay
from spmd.inspect.saving.document import defined_values, unique_names
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import DRAFT_MARKERS, FREE
from spmd.plan.cost.account import account
from spmd.plan.cost.suspicious_moves import SuspiciousMove, suspicious_moves
from spmd.plan.data.draft import Draft
from spmd.plan.data.layout import Layout
from spmd.plan.data.plan import PlanData
from spmd.plan.search.prepare import prepare


def explain(plan: PlanData, what: str | Value | Operation, *, exact: bool = False) -> Explanation:
    """Explain why a value of a plan is sharded as it is.

    Args:
        plan: the plan.
        what: the name of a value in `print(plan)`, the path of an argument (`0.params['w']`), a value, or an operation,
            which stands for its first result. A redistributed value stands for the one that was computed.
        exact: also replan each axis with every alternative fixed, for exact differences in seconds and bytes.

    Raises:
        PlanError: the plan has no such value.
    """
    return Explainer.of(plan).explain(_resolve(plan, what), exact=exact)


@attrs.frozen(eq=False)
class Explainer:
    """Explains the values of one plan.

    Args:
        suspicious: the suspicious moves of the plan.
        draft: the program before planning, with the given specs of inputs, results and constraints as operations.
        specs: the specs of its values in the plan.
        replays: the problem of each axis, in planning order.
    """

    suspicious: tuple[SuspiciousMove, ...]
    draft: Draft
    specs: Mapping[Value, DTensorSpec]
    replays: tuple[Replay, ...]

    @classmethod
    def of(cls, plan: PlanData) -> Explainer:
        """The explainer of a plan."""
        prepared = prepare(plan.request)
        draft = prepared.draft(plan.order)
        replays = tuple(replay(plan, prepared, axis) for axis in plan.order)
        return cls(suspicious_moves(plan, account(plan)), draft, {**draft.specs(), **plan.specs}, replays)

    def explain(self, value: Value, *, exact: bool = False) -> Explanation:
        """Explain why a value of the program is sharded as it is; `exact` as in `explain`."""
        operation = producer_of(self.draft, value)
        return Explanation(
            value,
            str(Layout(self.specs[value], self.draft.logical[value])),
            None if operation is None or operation in self.draft.pinned else operation,
            tuple(pins_of(self.draft, value)),
            tuple(AxisExplainer(found, value).explanation(exact) for found in self.replays),
            tuple(move for move in self.suspicious if value.name in move.parties),
        )


def _find_value(plan: PlanData, name: str) -> Value:
    """Find the value of a name, or the input at a path; of values that share a name, the last, which consumers take.

    Raises:
        PlanError: no value has the name, and no input or several are at the path; the message lists
            similar names.
    """
    graphs = plan.request.graph, plan.graph
    known = {value.name: value for graph in graphs for value in defined_values(graph)}
    known |= {text: value for graph in graphs for value, text in unique_names(graph).items() if text != value.name}
    wanted = name.removeprefix("%")
    if wanted in known:
        return known[wanted]
    inputs, paths = plan.request.graph.inputs, plan.request.input_paths
    found = find_inputs(name, paths, [value.name for value in inputs])
    if len(found) == 1:
        return inputs[found[0]]
    if found:
        first = ", ".join(paths[number] for number in found[:5])
        raise PlanError(f"{name!r} names {len(found)} arguments: {first}{', ...' * (len(found) > 5)}. Ask for one.")
    close = difflib.get_close_matches(wanted, (*known, *paths), n=5, cutoff=0.5)
    hint = f" Close names: {', '.join(close)}." if close else ""
    raise PlanError(
        f"The plan has no value {name!r}.{hint} print(plan) shows all {len(known)} of them; the names of the program "
        "that a rank runs are others."
    )


def _resolve(plan: PlanData, what: str | Value | Operation) -> Value:
    """The computed value, or the input, that the user's argument stands for."""
    if isinstance(what, Operation):
        if not what.tensors:
            raise PlanError(f"{what!r} has no result to explain.")
        value = what.tensors[0]
    else:
        value = _find_value(plan, what) if isinstance(what, str) else what
    known = set(defined_values(plan.request.graph))
    producers = plan.graph.producers
    while value not in known and value in producers and producers[value].op in (FREE, *DRAFT_MARKERS):
        value = producers[value].operands[0]
    if value in known:
        return value
    twin = next((other for other in known if other.name == value.name), None)
    if value in plan.specs and twin is not None:  # an argument before its dims were split into atoms
        return twin
    raise PlanError(f"{what!r} is not of this plan. Ask by name, or for a value of plan.graph.")
