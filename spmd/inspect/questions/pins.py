"""Finds the cheapest pin that avoids a collective: chosen among alternatives, and checked by planning again.

A pin is a spec that the user can give: `in_specs` of an argument, `out_specs` of a result, or a constraint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import attrs
import torch

from spmd.core.spec import DTensorSpec, P
from spmd.core.spec_text import encode_spec
from spmd.errors import PlanError
from spmd.inspect.questions.explain import Explainer
from spmd.inspect.questions.replay import states_of
from spmd.ir.comm import Comm
from spmd.ir.graph import Operation, Value, map_leaves
from spmd.ir.markers import REDISTRIBUTE, RELABEL
from spmd.ir.regions import CARRY, LEAVES, MERGE
from spmd.plan.cost.account import account
from spmd.plan.data.draft import logical_meta, spec_of
from spmd.plan.data.plan import PlanData
from spmd.plan.data.request import Request
from spmd.plan.memory.peak import memory_of
from spmd.plan.search.boundary import expressed
from spmd.plan.search.orders import plan as search

TRIALS = 4
"""How many pins are tried for one collective, those with the least expected cost first."""

WORK = 5_000
"""The most operations that all trials together may plan: for a large program, fewer pins are tried."""

MIN_EXAMINED = 3
"""How many collectives pins are searched for, the largest first, however large the program is."""


Pinning: TypeAlias = Callable[[Request], Request]
"""Adds a pin to a request."""


def _with_input_spec(request: Request, position: int, spec: DTensorSpec) -> Request:
    specs = [spec if number == position else given for number, given in enumerate(request.input_specs)]
    return attrs.evolve(request, input_specs=specs)


def _with_output_spec(request: Request, position: int, spec: DTensorSpec) -> Request:
    specs = [spec if number == position else given for number, given in enumerate(request.output_specs)]
    return attrs.evolve(request, output_specs=specs)


@attrs.frozen(eq=False)
class Suggestion:
    """A pin and its effect.

    Args:
        text: what to write.
        where: the line to write it at, starting with " at "; "" for `in_specs` and `out_specs`.
        seconds, bytes: the increase of predicted seconds and of bytes sent per rank in a step; negative for a decrease.
        memory: the increase of the most bytes that a rank holds.
        within: whether the plan with the pin is within the budget.
        pin: adds it to a request.
    """

    text: str
    where: str
    seconds: float
    bytes: float
    memory: int
    within: bool
    pin: Pinning

    def __str__(self) -> str:
        sent = f"{1e6 * self.seconds:+.3g} us and {self.bytes:+,.0f} bytes a step"
        return f"{self.text}{self.where}: {sent}, {self.memory:+,} bytes held"


@attrs.frozen(eq=False)
class _Trial:
    """A pin, and the expected increase in seconds."""

    pin: Pinning
    expected: float
    text: str
    where: str


def examined(plan: PlanData, comms: Sequence[Comm]) -> list[Comm]:
    """The collectives for which pins are searched: the largest, as many as are planned in reasonable time."""
    most = max(MIN_EXAMINED, WORK // max(1, len(plan.request.graph.operations)))
    return sorted(comms, key=lambda comm: -comm.bytes)[:most]


def suggest(plan: PlanData, comms: Sequence[Comm], excess: Callable[[PlanData], float]) -> dict[int, Suggestion | None]:
    """For each collective, by its id, the cheapest pin that avoids it; None if none of those tried does.

    Args:
        plan: the plan.
        comms: collectives of it.
        excess: how far a plan is over the budget; a pin avoids a collective if the plan with the pin has less excess.
    """
    if not comms:
        return {}
    explainer = Explainer.of(plan)
    operations = [(comm, operation) for operation, found in account(plan).comms.items() for comm in found]
    trials = max(1, min(TRIALS, WORK // (len(comms) * max(1, len(plan.request.graph.operations)))))
    found: dict[int, Suggestion | None] = {}
    for comm in comms:
        operation = next(o for other, o in operations if other == comm)
        operations.remove((comm, operation))
        ordered = sorted(_trials(plan, explainer, operation), key=lambda trial: trial.expected)
        tried = (_priced(plan, trial.text, trial.where, trial.pin, excess) for trial in ordered[:trials])
        found[id(comm)] = min(filter(None, tried), key=lambda suggestion: suggestion.seconds, default=None)
    return found


def _priced(
    plan: PlanData, text: str, where: str, pin: Pinning, excess: Callable[[PlanData], float]
) -> Suggestion | None:
    """A pin with what it costs; None if no plan has it, or it does not help."""
    try:
        pinned = search(pin(plan.request))
    except PlanError:
        return None
    left = excess(pinned)
    if left >= excess(plan):
        return None
    sent = [sum(comm.bytes for comm in found.comms) for found in (plan, pinned)]
    held = memory_of(pinned).peak - memory_of(plan).peak
    return Suggestion(text, where, pinned.seconds - plan.seconds, sent[1] - sent[0], held, not left, pin)


def together(
    plan: PlanData, suggestions: Iterable[Suggestion], excess: Callable[[PlanData], float]
) -> Suggestion | None:
    """All pins of different suggestions at once, with what they cost together; None if there are fewer than two."""
    chosen = list({suggestion.text: suggestion for suggestion in suggestions}.values())

    def pin(request: Request) -> Request:
        for suggestion in chosen:
            request = suggestion.pin(request)
        return request

    return _priced(plan, f"all {len(chosen)} at once", "", pin, excess) if len(chosen) > 1 else None


def _trials(plan: PlanData, explainer: Explainer, operation: Operation) -> Iterator[_Trial]:
    """Pins on both sides of a collective: on the value of its producer, and on the result of its first consumer."""
    if operation.op is not REDISTRIBUTE:
        yield from _alternatives(plan, explainer, operation.tensors[0])
        return
    producers = plan.graph.producers
    giver, taker = operation.operands[0], operation.tensors[0]
    while giver in producers and producers[giver].op in (REDISTRIBUTE, RELABEL):
        giver = producers[giver].operands[0]
    if giver in producers:
        yield from _alternatives(plan, explainer, giver)
    elif giver in plan.graph.inputs:
        yield from _input_trial(plan, plan.graph.inputs.index(giver), taker)
    users = [user for user in plan.graph.operations if taker in user.operands]
    while len(users) == 1 and users[0].op in (REDISTRIBUTE, RELABEL):
        (taker,) = users[0].tensors
        users = [user for user in plan.graph.operations if taker in user.operands]
    for position, value in enumerate(plan.graph.outputs):
        if value is taker:
            yield from _output_trial(plan, position, operation.operands[0])
    for user in users[:1]:
        yield from _alternatives(plan, explainer, user.tensors[0])


def _alternatives(plan: PlanData, explainer: Explainer, value: Value) -> Iterator[_Trial]:
    """Constraints of a value to specs of its producer's other strategies; none for values of a backward pass.

    What leaves a loop or a branch is constrained in it; what a loop carries, or one of two sides gives, has no line.
    """
    producers = plan.request.graph.producers
    while value in producers and producers[value].op in LEAVES:
        value = producers[value].operands[0]
    producer = producers.get(value)
    if producer is None or producer.source is None or producer.source.backward or producer.op in (CARRY, MERGE):
        return
    seen = {_pspec(plan, value, plan.specs[value])}
    position = producer.tensors.index(value)
    for replay, axis in zip(explainer.replays, explainer.explain(value).axes, strict=True):
        draft = replay.problem.draft
        for alternative in axis.alternatives:
            states = states_of(draft, value, axis.axis, alternative.strategy.results[position])
            spec = _pspec(plan, value, spec_of(plan.mesh, states, logical_meta(value.meta, draft.logical[value])))
            if spec is not None and spec not in seen:
                seen.add(spec)
                text = f"constrain {value.name} to {spec!r}"
                code = f" (`{producer.source.code}`)" if producer.source.code else ""
                where = f" at {producer.source}{code}"
                pin = functools.partial(constrained, value=value, spec=spec)
                yield _Trial(pin, alternative.extra_seconds, text, where)


def _input_trial(plan: PlanData, position: int, wanted: Value) -> Iterator[_Trial]:
    """The argument with the spec that its consumer requires."""
    spec, request = _pspec(plan, wanted, plan.specs[wanted]), plan.request
    if spec is not None:
        made = DTensorSpec.make(plan.mesh, spec, request.input_specs[position].meta)
        name = request.input_paths[position] if request.input_paths else request.graph.inputs[position].name
        pin = functools.partial(_with_input_spec, position=position, spec=made)
        yield _Trial(pin, 0.0, f"give {name} in_specs {spec!r}", "")


def _output_trial(plan: PlanData, position: int, held: Value) -> Iterator[_Trial]:
    """The result with the spec that it is produced with."""
    spec, request = _pspec(plan, held, plan.specs[held]), plan.request
    if spec is not None:
        made = DTensorSpec.make(plan.mesh, spec, request.graph.outputs[position].meta)
        pin = functools.partial(_with_output_spec, position=position, spec=made)
        yield _Trial(pin, 0.0, f"give result {position} out_specs {spec!r}", "")


def _pspec(plan: PlanData, value: Value, spec: DTensorSpec) -> P | None:
    """A spec over logical dims as a user would write it; None if no `P` expresses it."""
    physical = expressed(spec, value.meta, plan.logical[value], plan.order)
    return None if physical is None else physical.pspec


def constrained(request: Request, value: Value, spec: P) -> Request:
    """A request for the program with `constrain(value, spec)` after `value` is computed; consumers take its result."""
    result = Value(f"{value.name}_constrained", value.meta)
    use = lambda leaf: result if leaf is value else leaf  # noqa: E731
    operations: list[Operation] = []
    for operation in request.graph.operations:
        args, kwargs = map_leaves(use, (operation.args, dict(operation.kwargs)))
        operations.append(attrs.evolve(operation, args=args, kwargs=kwargs))
        if value in operation.tensors:
            pin = torch.ops.spmd.constrain.default
            operations.append(Operation(pin, (value, encode_spec(spec)), {}, (result,), operation.source))
    outputs = tuple(map(use, request.graph.outputs))
    graph = attrs.evolve(request.graph, operations=tuple(operations), outputs=outputs)
    return attrs.evolve(request, graph=graph.verify())
