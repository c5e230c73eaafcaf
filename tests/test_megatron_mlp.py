"""`examples/megatron_mlp.py`: the MLP by hand and by jit send the same, and both are that of one device."""

import os
import subprocess
import sys
from pathlib import Path

import optree
import pytest
import torch

import megatron_mlp
import spmd
from spmd import P

ROOT = Path(__file__).parents[1]
MESHES = [{"data": 2, "model": 4}, {"data": 1, "model": 8}, {"data": 2, "model": 1}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("by_hand", [False, True], ids=["jit", "by_hand"])
def test_numbers_are_those_of_one_device(axes, by_hand):
    mesh = spmd.make_mesh(axes, runtime="virtual")
    arguments = megatron_mlp.init(width=16, batch=8)
    step = megatron_mlp.make_step(mesh, megatron_mlp.by_hand(mesh) if by_hand else megatron_mlp.mlp)
    got, wanted = step(*arguments), megatron_mlp.gradients(megatron_mlp.mlp, *arguments)
    for x, want in zip(optree.tree_leaves(got), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(x.full_tensor(), want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("axes", [axes for axes in MESHES if axes["model"] > 1], ids=str)
def test_both_send_the_same(axes):
    mesh = spmd.make_mesh(axes, runtime="virtual")
    arguments = megatron_mlp.init()
    plans = [
        megatron_mlp.make_step(mesh, function).plan(*arguments)
        for function in (megatron_mlp.by_hand(mesh), megatron_mlp.mlp)
    ]
    by_hand, automatic = (sorted((comm.kind, comm.axes, comm.bytes) for comm in plan.comms) for plan in plans)
    assert by_hand == automatic
    x = arguments[1]
    ranks = axes["model"]
    one = 2 * (ranks - 1) / ranks * x.nbytes / axes["data"]
    assert [one, one] == [count for kind, over, count in by_hand if over == ("model",)]


def test_the_body_has_one_collective_and_its_gradient_another():
    mesh = spmd.make_mesh({"data": 1, "model": 4}, runtime="virtual")
    params, x, target = megatron_mlp.init()
    by_hand = megatron_mlp.by_hand(mesh)
    forward = spmd.jit(by_hand, (megatron_mlp.SPECS, P()), P(), mesh=mesh)
    assert {"all_reduce": 1} == forward.lower(params, x).count()
    step = megatron_mlp.make_step(mesh, by_hand)
    causes = [comm for comm in step.plan(params, x, target).comms if "body" in comm.cause]
    assert [False, True] == [comm.source.backward for comm in causes]


def test_without_the_psum_the_body_is_refused():
    mesh = spmd.make_mesh({"data": 1, "model": 4}, runtime="virtual")
    forgetful = spmd.shard_map(megatron_mlp.mlp, mesh, (megatron_mlp.SPECS, P()), P(), axis_names={"model"})
    params, x, _ = megatron_mlp.init()
    with pytest.raises(spmd.ShardingError, match=r"varying since .* Call spmd.collectives.psum"):
        forgetful(params, x)


def test_example_runs(capsys):
    assert 0 == megatron_mlp.main([])
    assert 2 == capsys.readouterr().out.count("numbers differ from one device's by")


def test_the_example_runs_on_processes(workers):
    assert [0, 0] == workers.run(megatron_mlp.main, [], ranks=2)


@pytest.mark.slow  # a launcher and two ranks import torch; tests/test_moe.py has a fast one
def test_the_other_example_with_collectives_runs_under_torchrun():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(ROOT / "examples" / "ring_attention.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert 0 == run.returncode, run.stderr
    assert 2 == run.stdout.count("one device's by"), run.stdout
