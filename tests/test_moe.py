"""The mixture of experts of `examples/moe.py` against the same on one device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sampling import product

import moe
import spmd
from spmd import P
from spmd.collectives.traffic import record_traffic

ROOT = Path(__file__).parents[1]
CONFIG = moe.Config(width=4, hidden=6)
each_dispatch = pytest.mark.parametrize("dispatch", moe.DISPATCHES.values(), ids=moe.DISPATCHES)


def virtual(ranks):
    return spmd.make_mesh({moe.AXIS: ranks}, runtime="virtual")


@pytest.mark.parametrize(("dispatch", "ranks"), product(moe.DISPATCHES.values(), [1, 2, 4, 8]))
def test_losses_and_gradients_are_those_of_one_device(dispatch, ranks):
    batches = [moe.make_batch(CONFIG, 24, seed) for seed in range(3)]
    _, found = moe.train(virtual(ranks), CONFIG, dispatch, batches)
    assert moe.worst_difference(CONFIG, batches, found) < 1e-5


@pytest.mark.parametrize("favourites", [[0, 1], [7, 6], [3, 4]], ids=str)
@each_dispatch
def test_no_token_is_dropped_where_all_choose_the_same_experts(dispatch, favourites):
    """Gradients of tokens and parameters, where ranks get all rows or none."""
    params, batch = moe.init(CONFIG).params, moe.make_batch(CONFIG, 16, 0)
    liked = torch.zeros(CONFIG.experts).index_put((torch.tensor(favourites),), torch.tensor([40.0, 39.0]))
    router = torch.cat([liked.unsqueeze(0), params.router[1:]])
    params, batch = params._replace(router=router), batch._replace(tokens=batch.tokens.abs() + 1)
    assert {*favourites} == {*moe.route(params, batch.tokens, 2)[1].flatten().tolist()}
    specs = (moe.SPECS, P(moe.AXIS))
    both = lambda loss: lambda *given: torch.func.grad_and_value(loss, (0, 1))(*given)  # noqa: E731
    sharded = moe.sharded_loss(CONFIG, dispatch, virtual(4))
    found = spmd.jit(both(sharded), specs, (specs, P()), mesh=virtual(4))(params, batch)
    expected = both(moe.one_device_loss(CONFIG))(params, batch)
    leaves = [torch.utils._pytree.tree_leaves(tree) for tree in (found, expected)]
    for got, want in zip(*leaves, strict=True):
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-5)


def sent_and_planned(dispatch):
    """The bytes that each rank sends in a step, and those in the plan, by collective."""
    batches = [moe.make_batch(CONFIG, 64, 0)]
    with record_traffic() as traffic:
        plan, _ = moe.train(virtual(4), CONFIG, dispatch, batches)
    exchanges = [comm.bytes for comm in plan.comms if comm.kind == "all_to_all"]
    sent = [transfer.sent for transfer in traffic.transfers if transfer.kind == "all_to_all"]
    return sent, exchanges


def test_what_is_sent_is_what_there_is():
    rows, width = 64 // 4 * CONFIG.choices, 4 * CONFIG.width
    sent, planned = sent_and_planned(moe.padded)
    assert sorted(max(sizes) for sizes in sent) == sorted(planned)
    assert 3 == planned.count(3 * rows * width)  # tokens, results, and the gradient of the results
    sent, planned = sent_and_planned(moe.ragged)
    assert [rows * width, 4 * rows * width, rows * width] == planned[-3:]
    assert all(max(sizes) <= bound for sizes, bound in zip(sent, planned, strict=True))
    assert all(max(sizes) < rows * width for sizes in sent)


def test_the_plan_names_the_collectives_of_the_body():
    plan, _ = moe.train(virtual(4), CONFIG, moe.ragged, [moe.make_batch(CONFIG, 24, 0)])
    assert all("of a shard_map body" in comm.cause and comm.source.file.endswith("moe.py") for comm in plan.comms)
    assert 3 == sum("at most: its sizes are data" in comm.cause for comm in plan.comms)


@pytest.mark.parametrize("dispatch", moe.DISPATCHES)
def test_the_example_runs(dispatch, capsys):
    assert 0 == moe.main(["--steps", "6", "--tokens", "64", "--dispatch", dispatch])
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]
    assert losses[-1] < losses[0]
    assert "Collectives of one step" in printed and "within 1e-05 of one device's" in printed


def test_options_that_do_not_fit(capsys):
    with pytest.raises(SystemExit):
        moe.main(["--tokens", "6"])
    assert "--tokens must divide by the number of ranks (got 6 and 4)" in capsys.readouterr().err


@pytest.mark.parametrize("dispatch", moe.DISPATCHES)
def test_the_example_runs_on_processes(workers, dispatch):
    arguments = ["--steps", "6", "--tokens", "64", "--dispatch", dispatch]
    assert [0, 0] == workers.run(moe.main, arguments, ranks=2)


def test_the_example_runs_under_torchrun():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "moe.py"), "--steps", "6", "--tokens", "64"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([*torchrun, *script], capture_output=True, text=True, env=environment, timeout=300)
    assert 0 == run.returncode, run.stderr
    assert 1 == run.stdout.count("step 6 of 6") == run.stdout.count("within 1e-05"), run.stdout
