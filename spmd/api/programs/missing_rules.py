"""Warnings about operators without a sharding rule for which shards are gathered."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch

from spmd.collectives.primitives import KINDS
from spmd.inspect.plan import Plan
from spmd.ir.graph import Graph, Operation
from spmd.ir.source import Source
from spmd.plan.cost.account import account
from spmd.plan.data.causes import is_passed
from spmd.rules import RULES
from spmd.tracing.source import user_source, where


class MissingRuleWarning(UserWarning):
    """Shards are gathered for an operator that has no sharding rule, and runs replicated."""


def warn_of_missing_rules(plan: Plan) -> None:
    """Warn, once for each line, of operators without a rule for which a plan gathers what is sharded."""
    if not plan.fallbacks:
        return
    sent = {
        operation: sum(comm.bytes for comm in comms if KINDS[comm.kind].gathers)
        for operation, comms in account(plan).comms.items()
    }
    gathered: dict[tuple[torch._ops.OpOverload, Source | None], dict[Operation, str]] = {}
    for operation in plan.fallbacks:
        if operation.op.namespace in _OWN:
            continue
        for gather in _gathers(operation, plan.graph, sent):
            spec = f"{gather.operands[0].meta} {plan.layout(gather.operands[0])}"
            gathered.setdefault((operation.op, operation.source), {})[gather] = spec
    for (op, source), specs in gathered.items():
        shown = " and ".join(dict.fromkeys(specs.values()))
        _warn(op, source or user_source(), shown, sum(map(sent.__getitem__, specs)))


def _gathers(operation: Operation, graph: Graph, sent: Mapping[Operation, float]) -> Iterator[Operation]:
    """The gathers of an operation's operands; views and markers may be in between."""
    for operand in dict.fromkeys(operation.operands):
        value = graph.origin(operand, lambda other: is_passed(other) and not sent.get(other))
        producer = graph.producers.get(value)
        if producer is not None and is_passed(producer):
            yield producer


def _warn(op: torch._ops.OpOverload, source: Source | None, specs: str, sent: float) -> None:
    if (op, source) in _warned:
        return
    _warned.add((op, source))
    remedy = (
        "rules= leaves it out: write spmd.rules.RULES | {...}"
        if op in RULES
        else f"Give it a rule: spmd.jit(..., rules=spmd.rules.RULES | {{torch.ops.{op}: rule}}), see docs/rules.md"
    )
    message = (
        f"{op} at {where(source)} has no sharding rule and runs replicated. Gathered for it: {specs}, {sent:,.0f} "
        f"bytes that a rank sends in each call. {remedy}; comms='error' refuses such plans."
    )
    if source is None:
        warnings.warn(message, MissingRuleWarning, stacklevel=2)
    else:
        warnings.warn_explicit(message, MissingRuleWarning, source.file, source.line, registry={})


_OWN = frozenset({"spmd", "spmd_host"})
"""The namespaces of our own operators: those without a rule, such as `pure_callback`, are said to take whole values."""

_warned: set[tuple[torch._ops.OpOverload, Source | None]] = set()
