"""`comms_of`: what runs in a context, with causes and lines."""

from __future__ import annotations

import pytest
import torch

import spmd
from spmd import P
from spmd.collectives.traffic import record_traffic
from spmd.errors import PlanError

MESH = spmd.make_mesh({"data": 2, "model": 3}, runtime="virtual")


def placed(spec: P, *shape: int) -> spmd.DTensor:
    return spmd.distribute(torch.rand(shape), spec, MESH)


def test_each_collective_has_its_cause_and_its_line() -> None:
    x, w = placed(P("data", "model"), 4, 6), placed(P("model"), 6, 3)
    total = spmd.jit(lambda x: x.sum(), P("data", "model"), mesh=MESH)
    with record_traffic() as seen, spmd.comms_of() as ran:
        x + 1
        y = x @ w
        y.redistribute(P())
        total(x)
    assert ran.bytes == sum(max(transfer.sent) for transfer in seen.transfers)
    assert [comm.kind for comm in ran.comms] == [transfer.kind for transfer in seen.transfers]
    assert ran.count() == {"reduce_scatter": 1, "all_to_all": 1, "all_reduce": 1}
    text = str(ran)
    assert text.startswith("3 collectives, ")
    assert "mm produces P('data', partial={'model': 'sum'})" in text and "by redistribute(P())" in text
    codes = [comm.source.code for comm in ran.comms if comm.source is not None]
    assert codes[:2] == ["y = x @ w", "y.redistribute(P())"] and "x.sum()" in codes[-1]


def test_a_cached_program_has_the_line_of_the_call() -> None:
    x = placed(P("data"), 4)
    found = []
    for _ in range(2):
        with spmd.comms_of() as ran:
            x.amin()
        found.append(ran.comms[0].source)
        with spmd.comms_of() as ran:
            x.amin().item()  # on another line
        found.append(ran.comms[0].source)
    assert found[0] == found[2] and found[1] == found[3] and found[0].line + 3 == found[1].line


def test_reading_and_gradients_count() -> None:
    x, w = placed(P("data"), 4, 6), placed(P(), 6, 3).requires_grad_()
    with spmd.comms_of() as outer:
        loss = (x @ w).square().sum()
        with spmd.comms_of() as inner:
            loss.backward()
        x.full_tensor()
    gradient = {"reduce_scatter": 1, "all_to_all": 1}  # scattered by the product, and an exchange to the leaf's spec
    assert inner.count() == gradient
    assert outer.count() == {"all_reduce": 1, **gradient, "all_gather": 1}
    assert outer.comms[1] == inner.comms[0]


def test_refused_before_anything_is_sent() -> None:
    x = placed(P("data"), 4)
    add, total = (spmd.jit(f, P("data"), mesh=MESH) for f in (lambda x: x + 1, lambda x: x.sum()))
    with record_traffic() as seen, spmd.comms_of(error=True):
        add(x) * 2
        for call in (x.sum, x.full_tensor, lambda: x.redistribute(P()), lambda: total(x), x.tolist):
            with pytest.raises(PlanError, match=r"at test_communication.py:\d+ .* communicates, under spmd.comms_of"):
                call()
    assert not seen.transfers
