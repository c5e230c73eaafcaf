"""The lower bound of what ranks send: closed forms, plans that send it, and rules without their cheap strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F

import spmd
from proofs.least_sent.bound import least_sent
from proofs.least_sent.sweep import sent_by, sweep_entry
from proofs.op_sweep.cases import Case, entries
from spmd import P
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.ir.call import Call
from spmd.rules import RULES
from spmd.rules.rule import Factors, Rule

MESH = spmd.make_mesh({"x": 4}, runtime="virtual")
ROWS, ALL, PENDING = P("x"), P(), P(partial={"x": "sum"})
X = torch.arange(24.0, dtype=torch.float64).reshape(8, 3) / 7 + 1
Y = X[:, :2].flip(0).contiguous()

Function = Callable[..., torch.Tensor]

CLOSED_FORMS: dict[str, tuple[Function, tuple[tuple[torch.Tensor, P], ...], P, tuple[int, float, int]]] = {
    # What is sent by one rank, received on average, and merged; every rank holds two of eight rows.
    "norm": (lambda x: x.norm(), ((X, ROWS),), ALL, (1, 1, 1)),
    "norm 3 by column": (lambda x: torch.linalg.vector_norm(x, 3, 0), ((X, ROWS),), ALL, (3, 3, 3)),
    "prod": (lambda x: x.prod(), ((X / 3, ROWS),), ALL, (1, 1, 1)),
    "sum by column": (lambda x: x.sum(0), ((X, ROWS),), ALL, (3, 3, 3)),
    "sum to rows": (lambda x: x.sum(1), ((X, ROWS),), ROWS, (0, 0, 0)),
    "mean by row": (lambda x: x.mean(1), ((X, ROWS),), ALL, (2, 6, 0)),
    "logsumexp": (lambda x: x.logsumexp(0), ((X, ROWS),), ALL, (3, 3, 3)),
    "softmax": (lambda x: x.softmax(0), ((X, ROWS),), ROWS, (3, 3, 0)),
    "select": (lambda x: x[5], ((X, ROWS),), ALL, (3, 2.25, 0)),
    "pointwise": (lambda x: x.sin(), ((X, ROWS),), ROWS, (0, 0, 0)),
    "gather": (lambda x: x * 2, ((X, ROWS),), ALL, (6, 18, 0)),
    "diff": (lambda x: x[1:] - x[:-1], ((X, ROWS),), ROWS, (3, 2.25, 0)),
    "roll": (lambda x: x.roll(1, 0), ((X, ROWS),), ROWS, (3, 3, 0)),
    "flip": (lambda x: x.flip(0), ((X, ROWS),), ROWS, (6, 6, 0)),
    "transpose": (lambda x: x.mT.contiguous(), ((X, ROWS),), ROWS, (6, 4.5, 0)),
    "cumsum": (lambda x: x.cumsum(0), ((X, ROWS),), ROWS, (3, 2.25, 0)),
    "product": (lambda x, y: x.mT @ y, ((X, ROWS), (Y, ROWS)), ALL, (6, 6, 6)),
    "topk": (lambda x: x.topk(2, 0)[0], ((X, ROWS),), ALL, (6, 4.5, 0)),
    "argmax": (lambda x: x.argmax(0), ((X, ROWS),), ALL, (0, 3, 3)),
    "positions": (lambda x: x[torch.tensor([0, 7])], ((X, ROWS),), ALL, (3, 4.5, 0)),
    "convolution": (
        lambda x: F.conv1d(x, x.new_tensor([[[1, 2, 3.0]]]), padding=1),
        ((X[:, :2].reshape(1, 1, 16), P(None, None, "x")),),
        P(None, None, "x"),
        (2, 1.5, 0),
    ),
    "all_reduce": (lambda x: x * 1, ((X, PENDING),), ALL, (24, 24, 24)),
    "reduce_scatter": (lambda x: x * 1, ((X, PENDING),), ROWS, (18, 6, 0)),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name: str) -> None:
    function, operands, out, expected = CLOSED_FORMS[name]
    tensors = [x for x, _ in operands]
    specs = [DTensorSpec.make(MESH, spec, TensorMeta.of(x)) for x, spec in operands]
    results = [DTensorSpec.make(MESH, out, TensorMeta.of(function(*tensors)))]
    found = least_sent(lambda *some: [function(*some)], [tensors], specs, results)
    assert (found.sent, found.received, found.merged) == expected


COLUMNS = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()

CHEAP: dict[str, tuple[Function, float]] = {
    "norm": (lambda x: x.norm(), 2),
    "norm 3": (lambda x: torch.linalg.vector_norm(x, 3, dim=0), 2),
    "prod": (lambda x: (1 + x / 99).prod(), 2),
    "select": (lambda x: x[40], 2),
    "roll": (lambda x: x.roll(1, 0), 2),
    "diff": (lambda x: x[1:] - x[:-1], 2),
    "logsumexp": (lambda x: x.logsumexp(0), 4),
    "softmax": (lambda x: x.softmax(0), 3),
    "write a row": (lambda x: torch.select_scatter(x, x.sum(0), 0, 7), 2),
    "product": (lambda x: x.mT @ x, 2),
}
"""Functions of COLUMNS whose plans send so many times what they must, at most.

Sums of exponentials send a maximum, too, and merge on all ranks where the result would be sharded.
"""


def worst(function: Function, rules: Any = RULES) -> float:
    """The largest ratio of what plans of a function of COLUMNS, sharded by rows, send to what they must."""
    case = Case("columns", lambda *tensors: [function(*(x.clone() for x in tensors))], (COLUMNS,))
    by_rows = [sent for sent in sent_by(case, MESH, 4, rules) if "P('x') ->" in sent.label]
    assert by_rows
    return max(sent.ratio for sent in by_rows)


@pytest.mark.parametrize("name", CHEAP)
def test_plans_send_what_they_must(name: str) -> None:
    function, ratio = CHEAP[name]
    assert worst(function) <= ratio


def without_bodies(rule: Rule) -> Rule:
    """A rule without the strategies that have a body of their own."""

    def factorize(call: Call) -> Factors:
        found = rule.factorize(call)
        rows = tuple(row for row in found.rows if row.body is None)
        barred = found.replicate | frozenset(found.bodies)
        return attrs.evolve(found, rows=rows, bodies={}, replicate=barred)

    return attrs.evolve(rule, factorize=factorize)


@pytest.mark.parametrize("name", ["norm", "norm 3", "prod", "select", "roll", "logsumexp", "softmax"])
def test_a_rule_without_its_cheap_strategies_shows(name: str) -> None:
    function, ratio = CHEAP[name]
    mutilated = {op: without_bodies(rule) for op, rule in RULES.items()}
    assert worst(function, mutilated) > max(2, ratio)


@pytest.mark.parametrize("name", ["roll", "select", "t", "index_select", "cumsum", "diff"])
def test_entries_of_the_database(name: str) -> None:
    found = sweep_entry(entries(f"{name}$")[0], ranks=2)
    assert found.calls and found.worst is not None and found.worst.ratio <= 2
