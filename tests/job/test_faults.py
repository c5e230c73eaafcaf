"""A rank that goes wrong: every other one says so in time, and says which and why."""

import functools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import fault_cases as cases
import pytest
import restarted_example
import torch

import gpt
import layouts
import train_gpt
import training
from spmd import checkpoint
from spmd.core.mesh import make_mesh
from spmd.core.pytree import tree_leaves
from spmd.errors import SpmdError
from spmd.job.collective_scope import CollectiveScope, explain
from spmd.job.failure_detector import PATIENCE
from spmd.job.launch import launch
from spmd.testing.local_job import local_job

pytestmark = pytest.mark.faults

RANKS = 4
SLACK = 60.0
"""Seconds for a busy machine, or as long as a job has taken before its first rank ended, where that is more."""


def run_job(forks, case, *args, ranks=range(RANKS), waits_for=None, timeout=cases.PATIENT):
    """The error by which each rank of a job ends, None if it is killed; only `ranks` are started.

    Args:
        waits_for: those whose end is waited for; the others are killed then.
        timeout: of starting, and of collectives before the fault.
    """
    job, processes, ends = local_job(RANKS), {}, {}
    together, began = forks.Barrier(len(ranks)), time.monotonic()
    for rank in ranks:
        environment = {**job, "RANK": str(rank)}
        receiver, sender = forks.Pipe(duplex=False)
        process = forks.Process(target=cases.rank, args=(case, args, timeout, environment, together, sender))
        process.start()
        sender.close()
        processes[rank] = process, receiver
    try:
        deadline = time.monotonic() + cases.PATIENT
        for rank in ranks if waits_for is None else waits_for:
            process, receiver = processes[rank]
            try:
                assert receiver.poll(deadline - time.monotonic()), f"rank {rank} hangs; before: {ends}"
                ends[rank] = receiver.recv()
                # what is left to do is done in time: nobody waits for the first timeout
                slack = max(SLACK, time.monotonic() - began)
                deadline = min(deadline, time.monotonic() + cases.TIMEOUT + PATIENCE + slack)
            except EOFError:
                ends[rank] = None
    finally:
        for process, _ in processes.values():
            process.kill()
            process.join()
    return ends


def others(rank):
    return [other for other in range(RANKS) if other != rank]


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
"""A case that only `make test-faults` and `make test-all` run."""

COLLECTIVE = r"SpmdError: (all_reduce|all_gather|reduce_scatter) over data \(.* at fault_cases\.py:\d+\) failed"


@pytest.mark.parametrize("case", [cases.killed, SLOW(cases.stopped)], ids=["SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_gone_in_a_step_is_named(forks, case):
    ends = run_job(forks, case, 2, waits_for=others(2))
    for end in ends.values():
        assert re.match(COLLECTIVE + ": rank 2 does not answer", end), end


@pytest.mark.slow
def test_without_the_rank_that_keeps_the_store_it_is_said(forks):
    ends = run_job(forks, cases.killed, 0, waits_for=others(0))
    for end in ends.values():
        assert re.match(COLLECTIVE + ": rank 0 or the launcher, which keeps the store", end), end


def test_a_rank_that_is_stuck_is_told_where(forks):
    line = 1 + next(n for n, text in enumerate(Path(cases.__file__).read_text().splitlines()) if "# stuck" in text)
    for end in run_job(forks, cases.stuck, 1, waits_for=others(1)).values():
        assert re.match(COLLECTIVE + rf": rank 1 is in no collective, at fault_cases\.py:{line}\.", end), end


def test_an_error_in_user_code_reaches_the_others(forks):
    ends = run_job(forks, cases.raises_between_steps, 1)
    assert "ValueError: no such file" == ends.pop(1)
    for end in ends.values():
        assert re.match(COLLECTIVE + ", because rank 1 failed: ValueError: no such file", end), end


GONE = "has ended: its script is over or has called sys.exit"


@pytest.mark.parametrize("on", [SLOW(0), 2])
@pytest.mark.parametrize(
    ("case", "end", "words"),
    [(cases.returns, "", GONE), (cases.exits, "SystemExit: 1", r"has ended by sys\.exit\(1\)")],
    ids=["end", "exit"],
)
def test_a_rank_that_ends_is_called_what_it_is(forks, case, on, end, words):
    ends = run_job(forks, case, on)
    assert end == ends.pop(on)
    for other in ends.values():
        assert re.match(COLLECTIVE + f": rank {on} {words}", other), other


SCRIPT = """
import sys, torch, spmd
from spmd import P

mesh = spmd.make_mesh({"x": 2})
step = spmd.jit(lambda x: x - x.sum(), P("x"), P("x"), mesh=mesh)
x = step(torch.ones(4))
if spmd.process_index() == ON:
    sys.exit(1)
step(x)
"""


@pytest.mark.parametrize("on", [0, SLOW(1)])
def test_a_script_that_ends_is_called_what_it_is(on):
    variables = {**local_job(2), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT.replace("ON", str(on))]
    scripts = [
        subprocess.Popen(command, env={**os.environ, **variables, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [script.communicate(timeout=cases.PATIENT)[1] for script in scripts]
    finally:
        for script in scripts:
            script.kill()
    assert f"rank {on} {GONE}" in errors[1 - on], errors


@pytest.mark.parametrize(
    ("fails", "reason"),
    [SLOW(cases.kill, ": rank 2 does not answer"), (cases.fail, ", because rank 2 failed: ValueError: no such file")],
    ids=["SIGKILL", "error"],
)
def test_the_second_failure_of_a_job_is_not_blamed_on_the_first(forks, fails, reason):
    for end in run_job(forks, cases.fails_after_another, 1, fails, 2, waits_for=others(2)).values():
        assert re.match(r"SpmdError: (all_reduce|all_gather|reduce_scatter) over .* failed" + reason, end), end


@pytest.mark.parametrize(
    ("fails", "reason"),
    [SLOW(cases.kill, ": rank 3 does not answer"), (cases.fail, ", because rank 3 failed: ValueError: no such file")],
    ids=["SIGKILL", "error"],
)
def test_a_failure_in_a_submesh_is_told_to_those_who_wait(forks, fails, reason):
    ends = run_job(forks, cases.fails_in_a_submesh, fails, 3, waits_for=others(3))
    for end in ends.values():
        assert re.match(r"SpmdError: \w+ over data \(.*\) failed" + reason, end), end


@pytest.mark.parametrize(
    ("case", "more", "error"),
    [
        (cases.out_of_memory, (), "OutOfMemoryError: CUDA out of memory"),
        SLOW(cases.out_of_host_memory, (), r"RuntimeError: .*DefaultCPUAllocator: .*"),
        (cases.interrupted, (cases.handler_that_fails,), "RuntimeError: the machine is wanted by others"),
        (cases.interrupted, (cases.loader_with_a_worker,), r"RuntimeError: DataLoader worker \(pid \d+\) is killed by"),
    ],
    ids=["accelerator", "host", "handler", "loader"],
)
def test_an_error_in_a_collective_that_is_not_its_own_is_kept(forks, case, more, error):
    ends = run_job(forks, case, 1, *more)
    mine = ends.pop(1)
    assert re.match(error, mine), mine
    for end in ends.values():
        assert re.match(COLLECTIVE + f", because rank 1 failed: {error}", end), end


def test_a_shard_of_other_strides_on_one_rank_is_placed(workers):
    for found in workers.run(cases.strided, ranks=RANKS):
        assert torch.ones(1, dtype=torch.complex64).equal(found)


def test_an_error_in_the_function_reaches_the_others(forks):
    ends = run_job(forks, cases.raises_in_function, 1)
    assert "ValueError: no such layer" == ends.pop(1)
    for end in ends.values():
        assert re.match(r"SpmdError: Rank 1 failed in the first run .*: ValueError: no such layer", end), end


def test_a_position_out_of_range_on_one_rank_ends_the_others(forks):
    ends = run_job(forks, cases.position_out_of_range, 1)
    error = "IndexError: index 10 is out of bounds for dimension 0 with size 10"
    assert ends.pop(1).startswith(error)
    for end in ends.values():
        assert re.match(COLLECTIVE + f", because rank 1 failed: {error}", end), end


@pytest.mark.parametrize(
    ("case", "pattern"),
    [
        (cases.other_argument_later, r"waits in the comparison of ranks in the first run .* on rank 1"),
        SLOW(cases.other_call_later, r"waits in the comparison of ranks in distribute on .* on rank 1"),
        SLOW(
            cases.full_tensor_later, r"waits in the comparison of ranks in full_tensor\(\) of f32\[64,8\] .*on rank 1"
        ),
    ],
)
def test_ranks_that_part_after_the_first_run_say_where_they_are(forks, case, pattern):
    for end in run_job(forks, case, 1).values():
        assert re.match("DivergenceError: Ranks wait for each other in different places: .*" + pattern, end), end


@pytest.mark.slow
def test_a_rank_that_ends_a_call_early_is_named(forks):
    ends = run_job(forks, cases.ends_a_call_early, 1)
    assert "" == ends.pop(1)
    for end in ends.values():
        assert re.match(r"SpmdError: the comparison of ranks in call 3 of jitted functions, center on .*rank 1", end), (
            end
        )


# Slow without rank 0: the others wait for its store, and then for torch to give up.
@pytest.mark.parametrize("missing", [SLOW(0), 2])
def test_a_rank_that_does_not_start_is_named(forks, missing):
    for end in run_job(forks, cases.steps, ranks=others(missing), timeout=cases.START).values():
        message = "could not start .* Is rank 0 there" if missing == 0 else "rank 2 did not"
        assert re.match(f"SpmdError: .*{message}", end), end


@pytest.mark.parametrize(
    ("case", "message"),
    [(cases.killed, r"Rank 1 of 2 failed in launched:\n.*SIGKILL"), SLOW(cases.raises_between_steps, "no such file")],
    ids=["SIGKILL", "error"],
)
def test_launch_leaves_no_processes(tmp_path, case, message):
    with pytest.raises(SpmdError, match=f"(?s){message}"):
        launch(cases.launched, 2, case, 1, str(tmp_path))
    pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
    assert 2 == len(pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


TINY = {"strategy": "fsdp", "steps": 40, "batch": 4, "context": 16, "width": 16, "heads": 2, "layers": 1}


@pytest.mark.slow
def test_the_example_is_restarted_to_the_same_state(workers, tmp_path):
    whole, killed = (str(tmp_path / name) for name in ("whole", "killed"))
    options = [f"--{name}={value}" for name, value in TINY.items()]
    workers.run(train_gpt.main, [*options, "--checkpoint", whole], ranks=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    run = subprocess.run(
        [*command, restarted_example.__file__, killed, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=240,
    )
    assert 0 == run.returncode, run.stderr
    assert "SIGKILL" in run.stderr or "exitcode: -9" in run.stderr, run.stderr
    config = gpt.Config(vocab=256, width=16, layers=1, heads=2, context=16)
    mesh = make_mesh({"data": 2}, runtime="virtual")
    like = {"state": training.Training(config, layouts.STRATEGIES["fsdp"], mesh).state_spec, "step": 0}
    expected, found = (tree_leaves(checkpoint.load(folder, like, mesh=mesh)) for folder in (whole, killed))
    assert len(expected) == len(found) > 10 and 40 == expected[-1] == found[-1]
    for one, other in zip(expected[:-1], found[:-1], strict=True):
        assert one.full_tensor().equal(other.full_tensor())


DIVERGED = {
    "function": "The function differs between ranks: cos on ranks 0, 2, 3; sin on rank 1",
    "body": r"The program of <lambda> differs between ranks in line 6: .*add\(.*, 4\) .* ranks 0, 2, 3; .*add\(.*, 3\)",
    "shapes": r"Argument x of <lambda> differs between ranks: f32\[8\] P\('x'\) on ranks 0, 2, 3; f32\[7\] P\('x'\) on",
    "dtypes": r"Argument x of <lambda> differs between ranks: f32\[8\] P\('x'\) on ranks 0, 2, 3; f64\[8\] P\('x'\) on",
    "specs": r"Result 0 of <lambda> differs between ranks: f32\[8\] P\('x'\) on ranks 0, 2, 3; f32\[8\] P\(\) on",
    "constants": r"Constant \w+ of <lambda> differs between ranks: f32\[8\] with digest \w+ on ranks 0, 2, 3; ",
    "mesh": r"Ranks make different calls: the first run .* on Mesh\(x=4\) on ranks 0, 2, 3; .* on Mesh\(x=2, y=2\) on",
    "mesh of data": r"Ranks make different calls: distribute on Mesh\(x=4\) on ranks 0, 2, 3; .* Mesh\(y=4\)",
    "calls": r"Ranks make different calls: the first run .* on ranks 0, 2, 3; distribute on Mesh\(x=4\) on rank 1",
    "save": r"Ranks make different calls: distribute on Mesh\(x=4\) on ranks 0, 2, 3; checkpoint\.save on rank 1",
    "moves": r"Ranks make different calls: redistribute\(P\(\)\) of .* on ranks 0, 2, 3; full_tensor\(\) of f32\[8\] P",
    "local spec": r"Ranks make different calls: DTensor\.from_local\(\.\.\., P\('x'\)\) on .*; DTensor.* on rank 1\.",
}


@pytest.mark.parametrize("name", DIVERGED)
def test_ranks_that_part_raise_the_same(workers, name):
    first, *rest = workers.run(cases.diverge, name, ranks=RANKS)
    assert [first] * 3 == rest
    assert re.match(f"DivergenceError: {DIVERGED[name]}", first), first


FAILED = {
    "prefix": "distribute on .*: ShardingError: specs does not fit the tree",
    "argument": "the first run .*: ShardingError: argument 0 .* has spec",
    "error in function": "the first run .*: ValueError: no such layer",
    "error in plan": "the first run .*: PlanError: comms='error' forbids",
}


@pytest.mark.parametrize("name", FAILED)
def test_an_error_of_one_rank_is_one_of_all(workers, name):
    ends = workers.run(cases.diverge, name, ranks=RANKS)
    mine = ends.pop(1)
    assert ends[0].endswith(mine)
    for end in ends:
        assert re.match(f"SpmdError: Rank 1 failed in {FAILED[name]}", end), end


def test_every_divergence_is_tested():
    assert cases.DIVERGENT.keys() == DIVERGED.keys() | FAILED.keys()


A, B, AWAY = "waits in a", "waits in b", "is in no collective, at data.py:10"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([A, A, B, B], "SpmdError: a failed, although all ranks are there: reset"),  # others may wait elsewhere
        (
            [A, B, A, A],
            "DivergenceError: Ranks wait for each other in different places: waits in a on rank 0; waits in",
        ),
        ([A, None, B, AWAY], "SpmdError: a failed: rank 1 does not answer. A rank that does not answer was killed or"),
        ([A, None, None, A], "SpmdError: a failed: ranks 1, 2 do not answer."),
        ([A, A, AWAY, A], "SpmdError: a failed: rank 2 is in no collective, at data.py:10. (reset)"),
        ([A, None, AWAY, "failed: OSError: x"], "SpmdError: a failed, because rank 3 failed: OSError: x"),
    ],
)
def test_what_ranks_say_of_a_collective_of_two_of_them_is_explained(said, message):
    error = explain(CollectiveScope("a", (0, 1), range(4)), said, "reset")
    assert f"{type(error).__name__}: {error}".startswith(message)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([A, A, None, "failed: OSError: x"], "SpmdError: a failed, although all ranks are there: reset"),
        ([A, AWAY, None, "failed: OSError: x"], "SpmdError: a failed: rank 1 is in no collective, at data.py:10."),
        ([A, B, A, AWAY], "DivergenceError: Ranks wait for each other in different places: waits in a on rank 0; wait"),
        ([A, B, A, "failed: OSError: x"], "SpmdError: a failed, because rank 3 failed: OSError: x"),
        ([A, "has ended in turn, by SpmdError: b", A, None], "SpmdError: a failed: rank 3 does not answer."),
    ],
)
def test_ranks_outside_of_a_mesh_are_blamed_only_where_one_of_it_has_waited_for_them(said, message):
    error = explain(CollectiveScope("a", (0, 1)), said, "reset")
    assert f"{type(error).__name__}: {error}".startswith(message)


def test_two_threads_in_collective_calls(forks):
    """Every rank ends with an error that tells of two threads: its own, or that of another rank."""
    for end in run_job(forks, cases.two_threads).values():
        assert re.search("Two threads of this process are in collective calls at once", end), end
