"""What processes hold beside `plan.memory`: the figures are right, and so are some programs of the proof."""

import weakref

import pytest
import torch

import spmd
from proofs.memory_of_ranks.live import LiveStorages, peaks
from proofs.memory_of_ranks.measure import Row, smallest_peak
from proofs.memory_of_ranks.programs import PROGRAMS
from proofs.memory_of_ranks.ranks import Task, rows_of
from proofs.memory_of_ranks.report import markdown, summary
from spmd import P

KILO = 256 * 4
"""Bytes of 256 numbers."""


def test_live_storages_are_counted_once_and_until_they_are_freed():
    x = torch.ones(256)
    with LiveStorages([x]) as live:
        y = x + 1
        _ = y.view(2, -1)
        del y, _
        z = x * 2
        z.neg()
    assert (3 * KILO, "aten.neg.default") == (live.peak, live.where)


def test_constants_are_what_operators_read_and_somebody_holds():
    x, constant = torch.ones(256), torch.ones(256)
    with LiveStorages([x]) as live:
        x + constant
        x + torch.ones(256)
        torch.where(x > 0, x, 1.0)
    assert [weakref.ref(constant)] == [weakref.ref(found) for found in live.constants]


def test_peaks_of_a_call_have_arguments_and_constants():
    mesh = spmd.make_mesh({"x": 1}, runtime="virtual")
    constant = torch.ones(256)
    step = spmd.jit(lambda x: (x + constant).exp(), P(), P(), mesh=mesh)
    found = peaks(step, lambda: (spmd.distribute(torch.ones(256), P(), mesh),))
    assert (4 * KILO, 4 * KILO) == (found.live, found.allocator)
    assert step.plan(torch.ones(256)).memory.peak == found.live


def test_verdicts():
    row = Row("a", True, 2, plan=1000)
    assert "" == Row("a", True, 2, plan=1000, live=(1000, 900)).verdict
    more = Row("a", True, 2, plan=1000, live=(999, 1001), where="mm")
    assert "holds 1 bytes more than the plan says, after mm" == more.verdict
    assert "holds less than 90% of what the plan says" == Row("a", True, 2, plan=1000, live=(899, 899)).verdict
    assert "" == Row("a", True, 2, plan=1000, live=(500, 500), limit=1000, share=0.5).verdict
    assert "the plan exceeds its limit" == Row("a", True, 2, plan=1000, live=(500,), limit=999, share=0.5).verdict
    assert "PlanError: none" == Row("a", True, 2, note="PlanError: none").verdict
    assert row.limit is None


def test_tables_name_what_is_wrong():
    right = Row("right", True, 2, 1000, (1000, 900), (1200, 900))
    wrong = Row("wrong", False, 2, 1000, (1100, 900), (1300, 900), where="mm")
    failed = Row("failed", False, 2, note="PlanError: none")
    assert [
        "without limits: 3 cases, 2 wrong, 1 of them by less than 1,024 bytes",
        "  live/plan: 1.000 at least, 1.050 in the median, 1.100 at most",
        "  allocator/plan: 1.200 at least, 1.250 in the median, 1.300 at most",
    ] == list(summary([right, wrong, failed]))
    assert "| wrong | uneven | 2 |  | 1,000 | 1,100 | 1.100 | 1.300 |  | holds 100 bytes more" in markdown([wrong])


def test_the_smallest_peak_of_a_refusal_is_read():
    step = spmd.jit(torch.exp, P(), P(), mesh=spmd.make_mesh({"x": 2}, runtime="virtual"), memory_limit=1)
    with pytest.raises(spmd.PlanError) as refused:
        step.plan(torch.ones(256))
    assert 2 * KILO == smallest_peak(refused.value)


def test_there_are_programs_of_each_kind():
    assert len(PROGRAMS) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_what_the_plan_says(workers, ranks):
    names = ("gpt dp", "llama fsdp", "megatron by hand", "mlp wide dp, sgd, state kept", "reduces", "normalizes")
    tasks = [Task(name, even) for name in names for even in (True, False)]
    rows, *_ = workers.run(rows_of, tasks, ranks=ranks)
    assert [""] * len(tasks) == [row.verdict for row in rows]


@pytest.mark.slow
def test_a_refused_limit_names_one_that_is_accepted(workers):
    rows, *_ = workers.run(rows_of, [Task("mlp deep fsdp dim 0, sgd", True, (0.9, 0.1))], ranks=2)
    free, met, refused = rows
    assert free.limit is None and "met" == met.note
    assert refused.note.startswith("refused: at least ") and refused.plan == refused.limit < met.plan < free.plan
