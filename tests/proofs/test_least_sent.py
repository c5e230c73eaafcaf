"""The lower bound of what ranks send: closed forms, plans that send it, and rules without their cheap strategies."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F

import spmd
from proofs.least_sent.bound import least_sent
from proofs.least_sent.dependence import dependence, points_of
from proofs.least_sent.figures import Example, figures
from proofs.least_sent.functions import EXAMPLES, EXCEPTIONS
from proofs.least_sent.reasons import REASONS, reason_of
from proofs.least_sent.report import is_above
from proofs.least_sent.report_of_functions import not_needed
from proofs.least_sent.sizes import even_sizes
from proofs.least_sent.sweep import SETTINGS, Kind, Setting, kind_of, sent_by, sweep_entry
from proofs.op_sweep.cases import Case, cases, entries, full_name
from proofs.op_sweep.sweep import canonical
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

CLOSED_FORMS: dict[
    str, tuple[Function, tuple[tuple[torch.Tensor, P], ...], P | tuple[P, ...], tuple[int, float, int]]
] = {
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
    "gather of a narrower dtype": (lambda x: x.float(), ((X, ROWS),), ALL, (3, 9, 0)),
    "gather of two dtypes": (lambda x: (x.float(), x), ((X, ROWS),), (ALL, ALL), (6, 18, 0)),
    "diff": (lambda x: x[1:] - x[:-1], ((X, ROWS),), ROWS, (3, 2.25, 0)),
    "roll": (lambda x: x.roll(1, 0), ((X, ROWS),), ROWS, (3, 3, 0)),
    "flip": (lambda x: x.flip(0), ((X, ROWS),), ROWS, (6, 6, 0)),
    "transpose": (lambda x: x.mT.contiguous(), ((X, ROWS),), ROWS, (6, 4.5, 0)),
    "cumsum": (lambda x: x.cumsum(0), ((X, ROWS),), ROWS, (3, 2.25, 0)),
    "product": (lambda x, y: x.mT @ y, ((X, ROWS), (Y, ROWS)), ALL, (6, 6, 1)),
    "topk": (lambda x: x.topk(2, 0)[0], ((X, ROWS),), ALL, (6, 6, 3)),
    "max": (lambda x: x.max(0), ((X, ROWS),), (ALL, ALL), (3, 6, 3)),  # values and positions, merged at once
    "argmax": (lambda x: x.argmax(0), ((X, ROWS),), ALL, (0, 3, 3)),
    "positions": (lambda x: x[torch.tensor([0, 7])], ((X, ROWS),), ALL, (3, 4.5, 0)),
    "convolution": (
        lambda x: F.conv1d(x, x.new_tensor([[[1, 2, 3.0]]]), padding=1),
        ((X[:, :2].reshape(1, 1, 16), P(None, None, "x")),),
        P(None, None, "x"),
        (2, 1.5, 0),
    ),
    # Derivatives that are zero, or zero at some points.
    "round": (lambda x: x.round(), ((X, ROWS),), ALL, (6, 18, 0)),
    "sign": (lambda x, y: x.copysign(y), ((X[:, :2], P()), (Y - 2, ROWS)), ALL, (4, 12, 0)),
    "bounds": (lambda x: F.hardtanh(x, 1.5, 2.5), ((X, ROWS),), ALL, (6, 18, 0)),
    "maxima of pairs": (lambda x: torch.maximum(x[::2], x[1::2]), ((X, ROWS),), ALL, (3, 9, 0)),
    "sort": (lambda x: x.sort(0)[0], ((X, ROWS),), ROWS, (6, 5.75, 0)),  # 6 at another point
    # Two numbers, of which one is needed at a time: what both depend on decides, and the sender has it.
    "either": (
        lambda x, a: torch.stack([a.relu() * x[6, 0], (-a).relu() * x[7, 0]]),
        ((X, ROWS), (X[0, 0], P())),
        ALL,
        (1, 0.75, 0),
    ),
    "all_reduce": (lambda x: x * 1, ((X, PENDING),), ALL, (24, 24, 24)),
    "reduce_scatter": (lambda x: x * 1, ((X, PENDING),), ROWS, (18, 6, 0)),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name: str) -> None:
    function, operands, out, expected = CLOSED_FORMS[name]
    tensors = [x for x, _ in operands]
    specs = [DTensorSpec.make(MESH, spec, TensorMeta.of(x)) for x, spec in operands]
    outs = out if isinstance(out, tuple) else (out,)

    def listed(*some: torch.Tensor) -> list[torch.Tensor]:
        found = function(*some)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    results = [DTensorSpec.make(MESH, o, TensorMeta.of(x)) for o, x in zip(outs, listed(*tensors), strict=True)]
    found = least_sent(dependence(listed, list(points_of(tensors))), specs, results)
    assert (found.sent, found.received, found.merged) == expected


COLUMNS = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()

CHEAP: dict[str, tuple[Function, float]] = {
    "norm": (lambda x: x.norm(), 2),
    "norm 3": (lambda x: torch.linalg.vector_norm(x, 3, dim=0), 2),
    "prod": (lambda x: (1 + x / 99).prod(), 2),
    "select": (lambda x: x[20], 2),
    "roll": (lambda x: x.roll(1, 0), 2),
    "diff": (lambda x: x[1:] - x[:-1], 2),
    "logsumexp": (lambda x: x.logsumexp(0), 4),
    "softmax": (lambda x: x.softmax(0), 3),
    "write a row": (lambda x: torch.select_scatter(x, x.sum(0), 0, 7), 2),
    "product": (lambda x: x.mT @ x, 2.4),
}
"""Functions of COLUMNS whose plans send so many times what they must, at most.

Sums of exponentials send a maximum, too, and merge on all ranks where the result would be sharded. A symmetric product
is sent with both of its halves.
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


@pytest.mark.parametrize("name", ["select", "t", "index_select", "cumsum", "copysign", "sort", "ge", "topk", "half"])
def test_entries_of_the_database(name: str) -> None:
    found = sweep_entry(entries(f"{name}$")[0], Setting(placements=2))
    assert found.calls and not found.failure and found.below is None
    assert not is_above(found) or reason_of(name)


def test_even_sizes_give_even_shards() -> None:
    select = entries("select$")[0]
    with even_sizes(4):
        shapes = [case.tensors[0].shape for case in cases(select, 3)]
    assert all(length % 4 == 0 for shape in shapes for length in shape)
    assert cases(select, 1).__next__().tensors[0].shape == (5, 5, 5)


def test_random_results_are_left_out() -> None:
    found = sweep_entry(entries("normal.number_mean$")[0])
    assert found.is_random and not found.calls


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x.sin() + x.mT.mT, Kind.POINTWISE),
        (lambda x: x.mT[:2], Kind.VIEW),
        (lambda x: x.sin().sum(), Kind.OTHER),
    ],
)
def test_kinds_of_entries(function: Function, kind: Kind) -> None:
    assert kind is kind_of(canonical(Case("columns", lambda *tensors: [function(*tensors)], (COLUMNS,))))


def test_a_mesh_of_two_axes() -> None:
    case = Case("columns", lambda x: [x.sum(0)], (COLUMNS,))
    found = {sent.label: sent for sent in sent_by(case, Setting((2, 2)).mesh, 9)}
    assert all(sent.ratio <= 2 for sent in found.values())
    assert found["columns: P('x', 'y') -> P()"].least == 4  # two columns to merge, and the two others


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_functions_send_what_they_must(example: Example) -> None:
    for found in figures(example):
        assert found.is_close or found.name in EXCEPTIONS, found


@pytest.mark.slow
def test_exceptions_are_needed() -> None:
    assert not_needed([found for example in EXAMPLES for found in figures(example)]) == []


@pytest.mark.slow
@pytest.mark.parametrize("pattern", REASONS)
def test_a_reason_is_needed(pattern: str) -> None:
    chosen = [entry for entry in entries() if re.fullmatch(pattern, full_name(entry))]
    assert any(is_above(sweep_entry(entry, setting)) for setting in SETTINGS for entry in chosen)
