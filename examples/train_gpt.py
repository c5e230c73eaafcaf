"""Train a byte-level GPT on the Python standard library, on ranks that live in this process or, by torchrun, in many.

python examples/train_gpt.py
python examples/train_gpt.py --mesh data=8 --strategy fsdp
python examples/train_gpt.py --steps 20 --verify
python examples/train_gpt.py --strategy fsdp --dtype bfloat16
python examples/train_gpt.py --layers 40 --scan
python examples/train_gpt.py --checkpoint run --resume
torchrun --nproc-per-node 4 examples/train_gpt.py
"""

from __future__ import annotations

import argparse
import math
import time
from itertools import islice
from typing import Any

import optree
import torch
from rich.console import Console

import corpus
import gpt
import report
import spmd
from layouts import STRATEGIES
from training import State, Training, init, make_step

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
"""How far losses of the first five steps may be from one device's; rounding drives later ones apart."""

HELD_OUT_BATCHES = 8

SAVES = 10
"""Times that a run with `--checkpoint` is saved."""

LOG_LINES = 10
"""Lines of progress where there is no terminal to draw a bar in."""


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status is 1 if `--verify` finds other losses than one device's."""
    options = parse(arguments)
    console = report.make_console()
    strategy = STRATEGIES[options.strategy]
    axes = strategy.mesh_of(spmd.process_count()) if spmd.is_distributed() else strategy.mesh
    mesh = spmd.make_mesh(options.mesh or axes)
    config = gpt.Config(
        vocab=256,
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        context=options.context,
        scan=options.scan,
        dtype=DTYPES[options.dtype],
    )
    training = Training(config, strategy, mesh)
    text = corpus.read()
    console.print(report.mesh_table(mesh, options.strategy))
    console.print(
        f"{len(text.train) / 1e6:.1f} MB of text to train on, {len(text.held_out) / 1e6:.1f} MB held out: "
        f"{text.files} files of the standard library"
    )
    state, first = restore(training, options)
    console.print(report.params_table(state.params))

    batches = list(islice(corpus.batches(text.train, options.batch, config.context, options.seed), options.steps))
    train_step = training.step()
    describe(console, train_step, (state, batches[0]), options.show_program)

    held_out = list(
        islice(corpus.batches(text.held_out, options.batch, config.context, options.seed), HELD_OUT_BATCHES)
    )
    loss = training.loss()
    before = mean_loss(loss, state, held_out)
    state, losses = train(console, train_step, state, batches, first, options.checkpoint)
    after = mean_loss(loss, state, held_out)
    console.print(f"held-out loss {before:.3f} → {after:.3f} nats a byte ({after / math.log(2):.2f} bits)")
    show_sample(console, state, config, options.seed)
    return verify(console, training, batches, losses, options.seed) if options.verify and not console.quiet else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategy", choices=STRATEGIES, default="dp_tp", help="how the step is spread (dp_tp)")
    parser.add_argument("--mesh", type=mesh_axes, help="such as data=2,model=4 (the strategy's own; all processes)")
    parser.add_argument("--steps", type=positive, default=700)
    parser.add_argument("--batch", type=positive, default=16, help="sequences a step (16)")
    parser.add_argument("--context", type=positive, default=64, help="bytes a sequence (64)")
    parser.add_argument("--width", type=positive, default=128)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of parameters and arithmetic; updates and sums are float32"
    )
    parser.add_argument("--scan", action="store_true", help="make the layers one loop, traced and planned once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show-program", action="store_true", help="print the program that each rank runs")
    parser.add_argument("--checkpoint", metavar="DIR", help="save the run to this folder, now and then")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    parser.add_argument("--verify", action="store_true", help="run the same steps on one device too")
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--heads must divide --width (got {options.heads} and {options.width})")
    if options.resume and (options.verify or not options.checkpoint):
        parser.error("--resume needs --checkpoint DIR, and goes without --verify, which runs all steps")
    return options


def mesh_axes(text: str) -> dict[str, int]:
    """Axes of `data=2,model=4`."""
    axes = {}
    for part in text.split(","):
        name, _, count = part.partition("=")
        if not name.isidentifier() or not count.isdigit() or int(count) < 1 or name in axes:
            raise argparse.ArgumentTypeError(f"expected something like data=2,model=4 (got {text!r})")
        axes[name] = int(count)
    return axes


def positive(text: str) -> int:
    """A positive integer."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer (got {text!r})")
    return int(text)


def describe(console: Console, train_step: Any, arguments: tuple[Any, ...], show_program: bool) -> None:
    """Plan the step; print its collectives and, if asked to, the program."""
    start = time.perf_counter()
    with console.status("tracing and planning the training step"):
        train_step.compile(*arguments)  # on processes, ranks agree here on the machine to plan for
        plan = train_step.plan(*arguments)
        program = train_step.lower(*arguments)
    console.print(f"planned in {time.perf_counter() - start:.1f} s")
    console.print(report.comms_table(plan))
    if show_program:
        console.print(program.as_text(), markup=False, highlight=False, soft_wrap=True)


def restore(training: Training, options: argparse.Namespace) -> tuple[State, int]:
    """The state to begin with, and the steps that it has behind it; the checkpoint may be one of another mesh."""
    if options.resume and spmd.checkpoint.exists(options.checkpoint):
        like = {"state": training.state_spec, "step": 0}
        saved = spmd.checkpoint.load(options.checkpoint, like, mesh=training.mesh)
        return saved["state"], saved["step"]
    return training.init(options.seed), 0


def train(
    console: Console, train_step: Any, state: State, batches: list[gpt.Batch], first: int, checkpoint: str | None
) -> tuple[State, list[float]]:
    """Run the steps from number `first` on, under a progress bar; save to the folder `checkpoint` now and then."""
    train_step.compile(state, batches[0])
    losses: list[float] = []
    start = time.perf_counter()
    with report.progress(console) as progress:
        task = progress.add_task("training", total=len(batches), completed=first, loss=math.nan, speed=0.0)
        for done, batch in enumerate(batches[first:], start=first + 1):
            state, loss = train_step(state, batch)
            losses.append(loss.item())
            speed = (done - first) * batch[0].numel() / (time.perf_counter() - start)
            progress.update(task, advance=1, loss=losses[-1], speed=speed)
            if not console.is_terminal and is_due(done, len(batches), LOG_LINES):
                console.print(f"step {done} of {len(batches)}: loss {losses[-1]:.3f}, {speed:,.0f} tokens/s")
            if checkpoint and is_due(done, len(batches), SAVES):
                saving = spmd.checkpoint.save_async({"state": state, "step": done}, checkpoint)
    if checkpoint and losses:
        saving.wait()
    return state, losses


def is_due(done: int, total: int, times: int) -> bool:
    """Whether one of `times` occasions, spread evenly over `total` steps, comes with step `done`."""
    return done * times // total > (done - 1) * times // total


def mean_loss(loss: Any, state: Any, batches: list[gpt.Batch]) -> float:
    """The mean loss over some batches."""
    return sum(loss(state.params, batch).item() for batch in batches) / len(batches)


def show_sample(console: Console, state: Any, config: gpt.Config, seed: int) -> None:
    """Print what the model writes after `def `, generated on one device from the gathered parameters."""
    params = optree.tree_map(lambda leaf: leaf.full_tensor(), state.params)
    if console.quiet:
        return
    prompt = b"def "
    tokens = gpt.generate(params, torch.tensor(list(prompt)), config, 240, seed)
    console.rule("a sample")
    text = (prompt + bytes(tokens.tolist())).decode(errors="replace")
    console.print(report.printable(text), markup=False, highlight=False)
    console.rule()


def verify(console: Console, training: Training, batches: list[gpt.Batch], losses: list[float], seed: int) -> int:
    """Run the same steps on one device and compare."""
    step = make_step(training.config, training.optimizer)
    state = init(training.config, training.optimizer, seed)
    singles = []
    for batch in batches:
        state, loss = step(state, batch)
        singles.append(loss.item())
    pairs = list(zip(losses, singles, strict=True))
    console.print(report.losses_table(pairs))
    worst = max(abs(mesh - single) for mesh, single in pairs[:5])
    bound = TOLERANCES[training.config.dtype]
    verdict = "within" if worst <= bound else "NOT within"
    console.print(f"losses up to step {len(pairs[:5])} are {verdict} {bound:.0e} of one device's ({worst:.1e})")
    return int(worst > bound)


if __name__ == "__main__":
    raise SystemExit(main())
