"""Checkpoints of the distributed runtime, against those of the virtual one."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import checkpoint_cases as cases
import checkpoint_writers
import pytest
import restarted_run
import torch
import torch.distributed.checkpoint as dcp
from distributed_cases import CONFIG
from hypothesis import given, settings
from hypothesis import strategies as st

import layouts
import spmd
import training
from spmd.core.spec import TensorMeta
from spmd.testing import strategies

AXES = st.sampled_from([{"x": 4}, {"x": 2, "y": 2}, {"x": 1, "y": 4}])
SIZES = st.sampled_from([0, 1, 3, 5, 7])


@settings(max_examples=10)
@given(data=st.data(), written_axes=AXES, wanted_axes=AXES, count=st.integers(1, 8))
def test_processes_and_virtual_ranks_load_what_either_saves(workers, data, written_axes, wanted_axes, count):
    metas = [
        TensorMeta(data.draw(st.lists(SIZES, max_size=3)), data.draw(st.sampled_from(strategies.DTYPES)))
        for _ in range(count)
    ]
    written, wanted = (
        [
            data.draw(strategies.tensor_specs(spmd.make_mesh(axes, runtime="virtual"), meta, partial=False))
            for meta in metas
        ]
        for axes in (written_axes, wanted_axes)
    )
    values = [data.draw(strategies.tensors(meta)) for meta in metas]
    expected = [
        [value[spec.local_slices(coordinate)] for value, spec in zip(values, wanted, strict=True)]
        for coordinate in wanted[0].mesh.coordinates()
    ]

    def assert_loads(folder):
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        chunks = [sum(math.prod(chunk.sizes) for chunk in stored[str(number)].chunks) for number in range(count)]
        assert [meta.numel for meta in metas] == chunks
        virtual = zip(*cases.read(folder, wanted, "virtual"), strict=True)
        real = [
            [shard for (shard,) in found] for found in workers.run(cases.read, folder, wanted, "distributed", ranks=4)
        ]
        for shards, one, other in zip(expected, virtual, real, strict=True):
            torch.testing.assert_close(shards, list(one), rtol=0, atol=0)
            torch.testing.assert_close(shards, other, rtol=0, atol=0)

    with tempfile.TemporaryDirectory() as folder:
        workers.run(cases.write, folder, written, values, "distributed", ranks=4)
        assert_loads(folder)
        cases.write(folder, written, values, "virtual")
        assert_loads(folder)


def test_rank_0_writes_what_all_ranks_hold(workers, tmp_path):
    first, *others = workers.run(cases.plain_leaves, str(tmp_path), ranks=2)
    assert ["__0_0.distcp"] == first
    assert [first] == others


@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 2, "y": 2}])
def test_training_goes_on_while_a_save_runs(workers, tmp_path, axes):
    workers.run(cases.compute_while_saving, str(tmp_path), axes, ranks=math.prod(axes.values()))


def test_a_run_resumes_to_the_same_losses(workers, tmp_path):
    found = workers.run(cases.stop_and_resume, str(tmp_path), {"data": 2, "model": 2}, ranks=4)
    for uninterrupted, resumed in found:
        assert uninterrupted == resumed
    mesh = spmd.make_mesh({"data": 3}, runtime="virtual")
    elsewhere = cases.resume(str(tmp_path), training.Training(CONFIG, layouts.STRATEGIES["dp"], mesh))
    assert found[0][0] == pytest.approx(elsewhere, abs=1e-6, rel=0)


@pytest.mark.slow  # torchrun starts two ranks twice, and waits before it restarts them
def test_a_run_that_torchrun_restarts_ends_with_the_same_losses(workers, tmp_path):
    script, results = Path(restarted_run.__file__), tmp_path / "losses"
    expected, _ = workers.run(restarted_run.run, str(tmp_path / "whole"), ranks=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    run = subprocess.run(
        [*command, str(script), str(tmp_path / "killed"), str(results), "3"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(script.parents[1])},
        timeout=240,
    )
    assert 0 == run.returncode, run.stderr
    assert [False, expected] == json.loads(results.read_text())


ERRORS = {
    "shape": r"DivergenceError: leaf w differs between ranks: f32\[6\] P\('x'\) .* on ranks 0, 2, 3; f32\[6\] P\(\) .*",
    "number": r"DivergenceError: leaf step differs between ranks: 0 on ranks 0, 1, 2; 1 on rank 3\. Every rank must",
    "plain": r"DivergenceError: leaf w differs between ranks: f32\[2\] with digest \w+ on ranks 0, 1, 2; .* on rank 3",
    "leaves": r"DivergenceError: leaf extra differs between ranks: nothing on ranks 0, 2, 3; 1 on rank 1",
    "path": r"DivergenceError: the path differs between ranks: \S+ on ranks 0, 1, 3; \S+-2 on rank 2",
    "one leaf": r"CheckpointError: (Rank 3 of 4 failed: )?Leaf step must be a tensor, a number or text",
    "runtimes": r"MeshError: The leaves of a checkpoint must be on meshes of one runtime \(got distributed",
    "partial": r"ShardingError: Leaf w .* holds final values",
    "missing": r"(?s)CheckpointError: The checkpoint in .* is not like what is wanted:\n  v: missing\nIt has besides",
    "no checkpoint": r"CheckpointError: (Rank 2 of 4 failed: )?There is no checkpoint in \S+-2:",
    "like": r"DivergenceError: leaf w differs between ranks: f32\[6\] P\('x'\) .* on ranks 0, 2, 3; f32\[6\] P\(\) on",
    "disk": r"CheckpointError: Saving to .* failed: rank 2: OSError: no space left on device",
    "background": r"CheckpointError: Saving to .* failed: rank 2: OSError: no space left on device",
}


def test_errors_reach_all_ranks(workers, tmp_path):
    for found in workers.run(cases.errors, str(tmp_path / "checkpoint"), ranks=4):
        assert ERRORS.keys() == found.keys()
        for name, pattern in ERRORS.items():
            assert re.match(pattern, found[name]), found[name]


def test_a_folder_for_every_rank_is_a_mistake(workers):
    for found in workers.run(cases.own_folder, ranks=2):
        assert re.match(r"DivergenceError: the path differs between ranks: \S+ on rank 0; \S+ on rank 1", found)


@pytest.mark.faults
# Slow with many kills: each of them takes two new processes and their time limit.
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_whichever_rank_is_killed_a_save_leaves_one_whole(tmp_path, kills, forks):
    folder, moments = tmp_path / "checkpoint", random.Random(0)
    mesh = spmd.make_mesh({"data": 3}, runtime="virtual")
    number = 0
    for attempt in range(kills):
        done, sender = forks.Pipe(duplex=False)
        store = (tmp_path / f"store{attempt}").as_uri()
        ranks = [
            forks.Process(
                target=checkpoint_writers.save_forever_together, args=(rank, store, str(folder), number + 1, sender)
            )
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        sender.close()
        began = time.monotonic()
        number = done.recv()
        patience = 60 + time.monotonic() - began  # the slower the machine, the longer
        time.sleep(moments.uniform(0, 0.05))
        ranks[attempt % 2].kill()
        for process in ranks:
            process.join(patience)
        assert [-signal.SIGKILL, 0] == sorted(process.exitcode for process in ranks)
        *numbers, error = [number, *checkpoint_writers.sent(done)]
        number = numbers[-1]
        assert f"failed: rank {attempt % 2} does not answer" in error
        number = checkpoint_writers.assert_one_number(folder, mesh, {number, number + 1})
