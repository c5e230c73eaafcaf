import argparse
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import optree
import pytest
import torch
from rich.console import Console
from sampling import product, sample

import comms
import corpus
import decoding
import gpt
import layouts
import llama
import loops
import report
import spmd
import step_time
import textbook
import train_gpt
import training
from spmd import P
from spmd.optim import adamw

ROOT = Path(__file__).parents[1]
SMALL = gpt.Config(vocab=16, width=8, heads=2, layers=2, context=6)
BENCHMARK = {"dp": 6.51, "fsdp": 9.77, "tp": 16.54, "dp_tp": 8.05, "fsdp_tp": 8.53, "sp": 16.58}


def small_batch(batch=4):
    tokens = torch.randint(SMALL.vocab, (batch, SMALL.context + 1))
    return tokens[:, :-1], tokens[:, 1:]


def test_fused_attention_is_plain_attention():
    params, (tokens, _) = gpt.init(SMALL), small_batch()
    fused = gpt.Config(vocab=16, width=8, heads=2, layers=2, context=6, fused_attention=True)
    torch.testing.assert_close(gpt.forward(params, tokens, fused), gpt.forward(params, tokens, SMALL))


def test_forward_is_causal():
    params, (tokens, _) = gpt.init(SMALL), small_batch()
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % SMALL.vocab
    before, after = gpt.forward(params, tokens, SMALL), gpt.forward(params, changed, SMALL)
    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert not torch.allclose(after[:, 3:], before[:, 3:])


def test_a_fresh_model_knows_nothing():
    loss = gpt.loss(gpt.init(SMALL), small_batch(64), SMALL)
    torch.testing.assert_close(loss, torch.tensor(float(SMALL.vocab)).log(), rtol=0.01, atol=0)


def test_training_learns_on_one_device():
    step = training.make_step(SMALL, adamw(1e-2))
    state, batch = training.init(SMALL, adamw(1e-2)), small_batch()
    losses = []
    for _ in range(60):
        state, loss = step(state, batch)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


def test_generate_continues_a_prompt():
    prompt = torch.tensor([1, 2, 3])
    first, again = (gpt.generate(gpt.init(SMALL), prompt, SMALL, length=9) for _ in range(2))
    assert (9,) == first.shape
    assert first.tolist() == again.tolist()


def test_corpus_is_source_text_and_held_out_files_are_others():
    text = corpus.read(megabytes=0.3)
    assert 0.3e6 <= len(text.train) + len(text.held_out) <= 1e6
    assert b"import " in bytes(text.train.tolist())
    assert bytes(text.held_out[:2000].tolist()) not in bytes(text.train.tolist())


def test_batches_are_windows_and_what_follows():
    text = torch.arange(100, dtype=torch.uint8)
    tokens, targets = next(corpus.batches(text, batch=5, context=7, seed=3))
    assert (5, 7) == tokens.shape == targets.shape
    torch.testing.assert_close(targets, tokens + 1)
    again, _ = next(corpus.batches(text, batch=5, context=7, seed=3))
    torch.testing.assert_close(again, tokens)


@pytest.mark.parametrize("axes", [{"data": 8}, {"model": 3}, {"data": 2, "model": 4}, {"other": 2}])
@pytest.mark.parametrize("name", layouts.STRATEGIES)
def test_every_strategy_fits_every_mesh(name, axes):
    mesh = spmd.make_mesh(axes, runtime="virtual")
    state = training.Training(SMALL, layouts.STRATEGIES[name], mesh).init()
    torch.testing.assert_close(state.params["head"].full_tensor(), gpt.init(SMALL)["head"])
    assert {axis for leaf in optree.tree_leaves(state) for dim in leaf.spec.dims for axis in dim} <= set(axes)


def test_fully_sharded_specs_take_the_largest_dim_that_divides():
    mesh = spmd.make_mesh({"data": 2, "model": 4}, runtime="virtual")
    specs = layouts.param_specs(layouts.STRATEGIES["fsdp_tp"], mesh, gpt.Config(layers=1))
    block = specs["blocks"][0]
    assert P(("model", "data")) == specs["tokens"]
    assert P(None, "data") == specs["positions"]
    assert P("data", "model") == block["o"]
    assert P(None, ("model", "data")) == block["down"]["weight"]


def assert_trains_as_on_one_device(config, strategy, mesh, batch, steps=5):
    """Losses of a run within 1e-5; Adam's moments, which hold the gradient, within 1e-5 of the largest entry of each.

    Moments are compared after a step from one state: Adam divides by small numbers, so that the rounding of one step is
    tens of times larger in the next step's gradients, on one device in float32 as well when held against float64.
    """
    on_mesh = training.Training(config, strategy, mesh)
    state, step = on_mesh.init(), on_mesh.step()
    single, single_step = training.init(config, on_mesh.optimizer), training.make_step(config, on_mesh.optimizer)
    for _ in range(steps):
        after, _ = step(spmd.distribute(single, on_mesh.state_spec, mesh), batch)
        state, loss = step(state, batch)
        single, single_loss = single_step(single, batch)
        torch.testing.assert_close(loss.full_tensor(), single_loss, rtol=0, atol=1e-5)
        assert_close_moments(after.optimizer, single.optimizer)
    assert optree.tree_leaves(on_mesh.state_spec) == [leaf.spec.pspec for leaf in optree.tree_leaves(state)]


def assert_close_moments(moments, expected):
    for got, want in zip(optree.tree_leaves(moments), optree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("name", layouts.STRATEGIES)
def test_strategies_train_as_one_device(name):
    strategy = layouts.STRATEGIES[name]
    mesh = spmd.make_mesh(strategy.mesh, runtime="virtual")
    assert_trains_as_on_one_device(SMALL, strategy, mesh, small_batch(8))


@pytest.mark.parametrize("name", sample(layouts.STRATEGIES, ["fsdp_tp", "sp"]))
def test_layers_in_a_loop_train_as_one_device(name):
    strategy = layouts.STRATEGIES[name]
    mesh = spmd.make_mesh(strategy.mesh, runtime="virtual")
    config = attrs.evolve(SMALL, scan=True)
    torch.testing.assert_close(
        gpt.loss(gpt.init(config), batch := small_batch(8), config), gpt.loss(gpt.init(SMALL), batch, SMALL)
    )
    assert_trains_as_on_one_device(config, strategy, mesh, batch)


def test_the_plan_of_a_loop_of_layers_does_not_grow_with_them():
    def operations(layers):
        strategy, config = layouts.STRATEGIES["dp_tp"], attrs.evolve(SMALL, layers=layers, scan=True)
        example = training.Training(config, strategy, spmd.make_mesh(strategy.mesh, runtime="abstract"))
        state = training.init(config, example.optimizer)
        return len(example.step().plan(state, small_batch(8)).graph.operations)

    assert operations(80) <= 1.1 * operations(2)


@pytest.mark.parametrize(
    ("name", "axes"),  # the other strategies are these without an axis
    product(
        ["dp_tp", "fsdp_tp", "sp"], [{"data": 1}, {"model": 2}, {"data": 3}, {"model": 3}, {"data": 2, "model": 3}]
    ),
)
def test_strategies_train_as_one_device_on_uneven_meshes(name, axes):
    mesh, config = spmd.make_mesh(axes, runtime="virtual"), attrs.evolve(SMALL, layers=1)
    assert_trains_as_on_one_device(config, layouts.STRATEGIES[name], mesh, small_batch(4), steps=2)


@pytest.mark.parametrize("name", ["dp", "fsdp"])
def test_thirteen_sequences_over_eight_ranks(name):
    mesh = spmd.make_mesh({"data": 8}, runtime="virtual")
    assert_trains_as_on_one_device(SMALL, layouts.STRATEGIES[name], mesh, small_batch(13))


@pytest.mark.slow  # five seconds each; the next test takes steps of the same workload
@pytest.mark.parametrize("name", layouts.STRATEGIES)
def test_workload_trains_as_one_device(name):
    strategy = layouts.STRATEGIES[name]
    mesh = spmd.make_mesh(strategy.mesh, runtime="virtual")
    assert_trains_as_on_one_device(textbook.WORKLOAD, strategy, mesh, comms.workload_batch())


@pytest.mark.parametrize("name", sample(layouts.STRATEGIES, ["fsdp_tp"]))
def test_five_steps_in_double_precision_leave_the_state_of_one_device(name):
    strategy = layouts.STRATEGIES[name]
    mesh = spmd.make_mesh(strategy.mesh, runtime="virtual")
    on_mesh, batch = training.Training(textbook.WORKLOAD, strategy, mesh), comms.workload_batch()
    fresh = training.init(on_mesh.config, on_mesh.optimizer)
    single = optree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, fresh)
    state = spmd.distribute(single, on_mesh.state_spec, mesh)
    step, single_step = on_mesh.step(), training.make_step(on_mesh.config, on_mesh.optimizer)
    for _ in range(5):
        state, _ = step(state, batch)
        single, _ = single_step(single, batch)
    assert_close_moments(state.optimizer, single.optimizer)
    assert_close_moments(state.params, single.params)


@functools.cache
def measure(name):
    """What the benchmark counts, which two tests share."""
    return comms.measure(name)


@pytest.mark.parametrize("name", ["dp", "fsdp", "tp"])
def test_workload_sends_at_most_the_textbooks_bytes(name):
    measured = measure(name)
    assert round(measured.total / textbook.textbook(name), 2) <= 1.00
    assert measured.total == pytest.approx(measured.moved, rel=1e-6)


@pytest.mark.parametrize("name", layouts.STRATEGIES)
def test_the_page_has_the_bytes_that_the_benchmark_counts(name):
    measured, reference = measure(name).total, textbook.textbook(name)
    page = (Path(__file__).parents[1] / "docs/performance.md").read_text()
    rows = [row.split(" | ") for row in re.findall(rf"^\| {name} \| (.*) \|$", page, re.MULTILINE)]
    peers = [comms.ratio(megabytes, reference) for megabytes in attrs.astuple(textbook.PEERS[name])]
    assert [f"{reference / 1e6:.2f}", *peers, comms.ratio(measured / 1e6, reference)] in rows


@pytest.mark.parametrize("name", sample(layouts.STRATEGIES, ["dp", "fsdp_tp"]))
def test_every_collective_has_a_cause_and_a_line_of_the_example(name):
    # More weights than activations: the loss over a sharded vocabulary has collectives in local bodies.
    config = gpt.Config(vocab=16384, width=512, heads=8, layers=1, context=16)
    strategy = layouts.STRATEGIES[name]
    example = training.Training(config, strategy, spmd.make_mesh(strategy.mesh, runtime="abstract"))
    tokens = spmd.TensorMeta((2, config.context), torch.int64)
    state, step = training.init(config, example.optimizer), example.step()
    plan = step.plan(state, (tokens, tokens))
    collectives = (*plan.comms, *step.lower(state, (tokens, tokens)).collectives)
    assert collectives
    for collective in collectives:
        assert re.fullmatch(r".+ (produces|has) P\(.*\), .+ requires P\(.*\)|\w+ over a sharded dim", collective.cause)
        assert Path(collective.source.file).name in ("gpt.py", "training.py")
        assert collective.source.line > 0
    inside = [comm for comm in plan.comms if "over a sharded dim" in comm.cause]
    assert bool(inside) == (name != "dp")


def test_step_times_are_of_both():
    measured = step_time.measure("dp", SMALL, steps=2)
    assert min(measured.first, measured.mesh, measured.single) > 0
    assert measured.mesh / measured.single == measured.ratio


@pytest.mark.parametrize("name", layouts.STRATEGIES)
def test_textbook_bytes_are_the_published_ones(name):
    assert BENCHMARK[name] == round(textbook.textbook(name) / 1e6, 2)


def test_sizes_for_people():
    assert ["512 B", "2.05 kB", "6.51 MB", "1.5 GB"] == [report.size(n) for n in (512, 2048, 6_513_920, 1.5e9)]


def rendered(table):
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize(
    ("axes", "part"),
    [
        ({"data": 3}, "rank 0 │ rank 1 │ rank 2"),
        ({"data": 2, "model": 3}, "data 1         │  rank 3 │  rank 4 │  rank 5"),
        ({"data": 64}, "data │   64"),
        ({"x": 2, "y": 2, "z": 2}, "z    │    2"),
    ],
    ids=str,
)
def test_mesh_table(axes, part):
    assert part in rendered(report.mesh_table(spmd.make_mesh(axes, runtime="virtual"), "dp"))


def test_comms_table_accounts_for_every_collective():
    strategy = layouts.STRATEGIES["fsdp"]
    on_mesh = training.Training(SMALL, strategy, spmd.make_mesh(strategy.mesh, runtime="virtual"))
    plan = on_mesh.step().plan(on_mesh.init(), small_batch(8))
    printed = rendered(report.comms_table(plan))
    counts = [int(count) for count in re.findall(r"^│ [^│]*\w[^│]*│[^│]*│ +(\d+) │", printed, re.MULTILINE)]
    assert "smaller" in printed
    assert len(plan.comms) == counts[-1] == sum(counts[:-1])
    assert report.size(sum(comm.bytes for comm in plan.comms)) in printed


def test_samples_hold_no_control_characters():
    assert "def f():\n\treturn \ufffd[2J\ufffd" == report.printable("def f():\n\treturn \x1b[2J\x07")


def test_mesh_option():
    assert {"data": 2, "model": 4} == train_gpt.mesh_axes("data=2,model=4")
    for text in ("data", "data=0", "data=2,data=2", "=3"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"data=2,model=4 \(got"):
            train_gpt.mesh_axes(text)


def test_train_gpt_resumes_to_the_same_losses(tmp_path):
    console = Console(quiet=True)
    on_mesh = training.Training(SMALL, layouts.STRATEGIES["dp"], spmd.make_mesh({"data": 2}, runtime="virtual"))
    step, batches = on_mesh.step(), [small_batch() for _ in range(7)]

    def run(folder, count):
        options = train_gpt.parse(["--checkpoint", str(tmp_path / folder), "--resume"])
        state, first = train_gpt.restore(on_mesh, options)
        return train_gpt.train(console, step, state, batches[:count], first, options.checkpoint)[1]

    whole = run("whole", 7)
    parts = [run("parts", 4), run("parts", 7)]
    assert [4, 3] == list(map(len, parts))
    assert whole == parts[0] + parts[1]
    assert [] == run("parts", 7)


@pytest.mark.parametrize("arguments", [["--resume"], ["--resume", "--checkpoint", "run", "--verify"]])
def test_resume_option(arguments, capsys):
    with pytest.raises(SystemExit):
        train_gpt.parse(arguments)
    assert "--resume needs --checkpoint DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--strategy", "dp_tp"], marks=pytest.mark.slow),
        ["--strategy", "fsdp", "--mesh", "data=3"],
        ["--strategy", "fsdp_tp", "--dtype", "bfloat16"],
    ],
)
def test_train_gpt_runs_and_verifies(arguments, tmp_path, capsys):
    sizes = ["--steps", "6", "--batch", "4", "--context", "16", "--width", "32", "--heads", "4", "--layers", "1"]
    folder = str(tmp_path / "checkpoint")
    assert 0 == train_gpt.main([*arguments, *sizes, "--verify", "--show-program", "--checkpoint", folder])
    assert 6 == spmd.checkpoint.load(folder, {"step": 0})["step"]
    printed = capsys.readouterr().out
    for part in (
        "Parameters",
        "Collectives of one step",
        "def train_step(",
        "step 6 of 6",
        "held-out loss",
        "are within",
    ):
        assert part in printed


@pytest.mark.slow  # a launcher and two ranks import torch; tests/test_moe.py has a fast one
def test_train_gpt_runs_under_torchrun(tmp_path):
    sizes = ["--steps", "6", "--batch", "4", "--context", "16", "--width", "32", "--heads", "4", "--layers", "1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "train_gpt.py"), *sizes, "--verify"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([*torchrun, *script], capture_output=True, text=True, env=environment, timeout=300)
    assert 0 == run.returncode, run.stderr
    assert 1 == run.stdout.count("step 6 of 6") == run.stdout.count("within 1e-05"), run.stdout


@pytest.mark.parametrize("layout", ["sequence", "heads", "sequence, whole weights"])
def test_tokens_are_those_of_one_device_with_any_layout_of_the_cache(layout):
    config = llama.Config(vocab=16, width=16, heads=4, kv_heads=2, hidden=24, layers=2, dtype=torch.float32)
    torch.manual_seed(0)
    drawn = lambda tree: optree.tree_map(lambda x: torch.randn(x.shape) / 4, tree)  # noqa: E731
    weights, cache = drawn(llama.params(config)), drawn(decoding.empty_cache(config, 10))
    step = decoding.jitted(config, spmd.make_mesh({"x": 4}, runtime="virtual"), layout)
    sharded, token = cache, torch.tensor([3])
    for position in (0, 4, 9):
        logits, cache = decoding.decode(weights, cache, token, torch.tensor([position]), config)
        found, sharded = step(weights, sharded, token, torch.tensor([position]))
        torch.testing.assert_close(found.full_tensor(), logits)
        torch.testing.assert_close(spmd.full_tree(sharded), cache)
        token = logits.argmax(-1)


def test_a_token_sends_its_results_and_not_the_cache():
    mesh = spmd.make_mesh({"x": 8}, runtime="abstract")
    bytes_only = spmd.Machine(flops=1e24, memory_bandwidth=1e24, latency=0.0)
    config = attrs.evolve(decoding.LLAMA_8B, layers=2)
    arguments = decoding.arguments(config, decoding.CONTEXT)
    plan = decoding.jitted(config, mesh, "sequence, whole weights", machine=bytes_only).plan(*arguments)
    assert 1.5e6 * 2 / 32 >= sum(comm.bytes for comm in plan.comms) > 0


@pytest.mark.parametrize("axes", [{"x": 8}, {"x": 3}])
@pytest.mark.parametrize("name", loops.cases())
def test_algorithms_of_loops_are_those_of_one_device(name, axes):
    case = loops.cases()[name]
    step = spmd.jit(case.function, case.specs, mesh=spmd.make_mesh(axes, runtime="virtual"))
    torch.manual_seed(0)
    wanted = optree.tree_leaves(case.function(*case.arguments))
    for seed in (1, 0):  # a second call runs the same program
        torch.manual_seed(seed)
        found = optree.tree_leaves(step(*case.arguments))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.full_tensor(), y, rtol=1e-4, atol=1e-5)
    assert step.cache_info().currsize == 1


def test_accumulation_sums_over_ranks_once():
    case = loops.cases()["accumulation"]
    step = spmd.jit(case.function, case.specs, P(), mesh=spmd.make_mesh({"x": 8}, runtime="virtual"))
    assert [("all_reduce", 1)] == [(comm.kind, comm.times) for comm in step.plan(*case.arguments).comms]
