"""The benchmark against DDP, FSDP2 and `parallelize_module` measures equal steps, and its table hides no loss."""

import math
import sys

import pytest
import torch

import gpt
import peer_local
import peer_model
import peer_steps
import peers
import virtual_ranks
from step_time import StepTime

SMALL = gpt.Config(vocab=16, width=16, heads=2, layers=1, context=8)
OURS = peer_steps.Timing(0.2, 0.1, (2.0, 1.0))


def compared(**systems):
    return peer_steps.Comparison("dp", 128, 16, 4, OURS, systems, {"all_reduce": 2}, 3e6)


def test_the_model_of_modules_is_the_examples():
    params, batch = gpt.init(SMALL), (torch.arange(16).view(2, 8), torch.arange(16).flip(0).view(2, 8))
    loss = peer_model.Gpt(SMALL, params)(*batch)
    torch.testing.assert_close(loss, gpt.loss(params, batch, SMALL))


def test_both_train_alike_on_two_ranks(workers):
    case = peer_steps.Case("fsdp", SMALL, batch=4)
    comparison, _ = workers.run(peer_steps.measure, case, 2, ranks=2)
    (peer,) = comparison.peers.values()
    assert ("", "") == (comparison.disagreement(), peer.error)
    assert peer_steps.LOSSES == len(peer.losses) == len(comparison.spmd.losses)
    assert min(comparison.spmd.cpu, comparison.spmd.wall, peer.cpu, peer.wall) > 0
    assert min(*comparison.collectives.values(), comparison.sent) > 0


def test_both_train_alike_on_one_rank(workers):
    (steps,) = workers.run(peer_local.measure_local, SMALL, 2, 2, False, ranks=1)
    (optimizers,) = workers.run(peer_local.measure_optimizer, SMALL, 2, ranks=1)
    for found in (steps, optimizers):
        assert [1, 1] == [len(comparison.peers) for comparison in found]
        assert ["", ""] == [comparison.disagreement() for comparison in found]


def test_other_losses_are_named():
    assert "" == compared(DDP=peer_steps.Timing(0.1, 0.1, (2.00001, 1.0))).disagreement()
    other = compared(DDP=peer_steps.Timing(0.1, 0.1, (2.0, 1.1)))
    message = "dp, width 128, batch 16: losses differ, (2.0, 1.0) by spmd, (2.0, 1.1) by DDP"
    assert message == other.disagreement()
    assert compared(DDP=peer_steps.Timing(0.1, 0.1, (2.0, math.nan))).disagreement()


def test_rows_say_what_is_lost_and_what_fails():
    slower, faster = peer_steps.Timing(0.4, 0.2, (2.0, 1.0)), peer_steps.Timing(0.1, 0.2, (2.0, 1.0))
    failing = peer_steps.Timing.failed("RuntimeError: no rule")
    rows = list(peers.rows([compared(slower=slower, faster=faster, failing=failing)]))
    assert ["", "loses CPU", "RuntimeError: no rule"] == [row[-1] for row in rows]
    assert ("200.0", "400.0", "0.50", "100.0", "200.0", "0.50") == rows[0][4:10]
    assert ("200.0", "fails", "", "100.0", "fails", "") == rows[2][4:10]
    assert "" == compared(failing=failing).disagreement()


def test_markdown_marks_what_is_lost():
    faster = peer_steps.Timing(0.1, 0.2, (2.0, 1.0))
    *_, row = peers.page([compared(DDP=faster)])
    assert (
        "| dp | 128 | 16 | DDP | 200.0 | 100.0 | **2.00** | 100.0 | 200.0 | 0.50 | 2 all_reduce | 3.00 | loses CPU |"
        == row
    )


@pytest.mark.parametrize(
    ("given", "sizes"),
    [(["--widths", "8", "--batches", "2", "4"], [(8, 2), (8, 4)]), (["--sizes", "8x2", "16x4"], [(8, 2), (16, 4)])],
)
def test_sizes_are_given_one_by_one_or_as_a_product(given, sizes, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["peers.py", *given])
    assert sizes == peers.arguments().sizes


def test_rows_of_virtual_ranks_have_no_figures_of_jax_where_it_did_not_run():
    time = StepTime(first=1.0, mesh=0.9, single=0.6)
    ours = ["dp", "900", "600", "1.50"]
    assert [*ours, "", "", ""] == virtual_ranks.row("dp", time, {})
    assert [*ours, "1200", "0.75", "2.00"] == virtual_ranks.row("dp", time, {"one device": 0.6, "dp": 1.2})
