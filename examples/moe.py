"""Train a dropless mixture of experts by shard_map: every rank holds some experts, and tokens are sent to theirs.

python examples/moe.py
python examples/moe.py --ranks 8 --dispatch all_to_all
torchrun --nproc-per-node 4 examples/moe.py --dispatch ragged

No token is dropped, however many choose one expert. By `all_to_all` shapes are static, so that every rank sends every
other one as much as if all of its tokens went there, mostly padding. By `ragged_all_to_all` it sends what there is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

import report
import spmd
from spmd import P
from spmd.collectives import all_to_all, axis_size, psum, ragged_all_to_all
from spmd.optim import AdamWState, adamw

AXIS = "expert"
TOLERANCE = 1e-5
"""How far losses and gradients may be from one device's; sums run in another order."""


class Params(NamedTuple):
    """The router `[width, experts]`, and two matrices for each expert."""

    router: Tensor
    up: Tensor
    down: Tensor


class Batch(NamedTuple):
    """Tokens and what is to be computed of them, both `[tokens, width]`."""

    tokens: Tensor
    targets: Tensor


class State(NamedTuple):
    """What a training step takes and returns."""

    params: Params
    optimizer: AdamWState


SPECS = Params(P(), P(AXIS), P(AXIS))
STATE_SPECS = State(SPECS, AdamWState(P(), SPECS, SPECS))
OPTIMIZER = adamw(lr=1e-2)


Dispatch = Callable[[Params, Tensor, Tensor, Tensor], Tensor]
"""From a rank's experts, its rows sorted by expert, the number of each row's expert, and how many rows each expert
gets, `[ranks, experts of a rank]`, to the result of each row."""


@attrs.frozen
class Config:
    """Sizes: each token goes to the `choices` experts that its router likes best."""

    experts: int = 8
    choices: int = 2
    width: int = 16
    hidden: int = 32


def init(config: Config, seed: int = 0) -> State:
    """The state before the first step, on one device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-2] ** -0.5

    n, width, hidden = config.experts, config.width, config.hidden
    params = Params(normal(width, n), normal(n, width, hidden), normal(n, hidden, width))
    return State(params, OPTIMIZER.init(params))


def make_batch(config: Config, tokens: int, seed: int) -> Batch:
    """Random tokens; of each, the target is another linear function, by the direction in which it lies."""
    teacher = torch.Generator().manual_seed(0)
    maps = torch.randn(4, config.width, config.width, generator=teacher) * config.width**-0.5
    directions = torch.randn(config.width, 4, generator=teacher)
    x = torch.randn(tokens, config.width, generator=torch.Generator().manual_seed(seed))
    return Batch(x, (x.unsqueeze(1) @ maps[(x @ directions).argmax(-1)]).squeeze(1))


def route(params: Params, x: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """The weights of each token's experts, and their numbers, both `[tokens, choices]`."""
    scores, chosen = (x @ params.router).topk(choices, dim=-1)
    return scores.softmax(-1), chosen


def run_experts(params: Params, x: Tensor, numbers: Tensor) -> Tensor:
    """Each row of x through the expert whose number it has; zeros for numbers of none."""
    result = torch.zeros_like(x)
    for number, (up, down) in enumerate(zip(params.up, params.down, strict=True)):
        result = torch.where((numbers == number).unsqueeze(-1), torch.relu(x @ up) @ down, result)
    return result


def mixture(params: Params, x: Tensor, config: Config) -> Tensor:
    """The layer on one device."""
    weights, chosen = route(params, x, config.choices)
    results = [run_experts(params, x, chosen[:, choice]) for choice in range(config.choices)]
    return (torch.stack(results, 1) * weights.unsqueeze(-1)).sum(1)


def local_mixture(params: Params, x: Tensor, config: Config, dispatch: Dispatch) -> Tensor:
    """The layer on one rank, of its tokens, with its experts only.

    Every token is copied for each of its experts. Copies are sorted by expert, and so by the rank that holds it.
    """
    weights, chosen = route(params, x, config.choices)
    numbers, order = chosen.flatten().sort(stable=True)
    counts = (numbers.unsqueeze(1) == torch.arange(config.experts, device=x.device)).sum(0)
    sent = x[order // config.choices]
    results = dispatch(params, sent, numbers, counts.unflatten(0, (axis_size(AXIS), -1)))
    in_place = torch.zeros_like(results).index_copy(0, order, results)
    return (in_place.unflatten(0, chosen.shape) * weights.unsqueeze(-1)).sum(1)


def padded(params: Params, x: Tensor, numbers: Tensor, counts: Tensor) -> Tensor:
    """By all_to_all: the rows for a rank are padded to as many as there are for all ranks."""
    ranks, held = counts.shape
    rank = numbers // held
    position = torch.arange(len(x), device=x.device) - starts(counts.sum(1))[rank]
    rows = x.new_zeros(ranks, *x.shape).index_put((rank, position), x)
    local = numbers.new_full((ranks, len(x)), held).index_put((rank, position), numbers % held)
    rows, local = all_to_all((rows, local), AXIS, 0, 0, tiled=True)
    results = run_experts(params, rows.flatten(0, 1), local.flatten()).view_as(rows)
    return all_to_all(results, AXIS, 0, 0, tiled=True)[rank, position]


def ragged(params: Params, x: Tensor, numbers: Tensor, counts: Tensor) -> Tensor:
    """By ragged_all_to_all: the rows that are there. They arrive by rank, and from each rank by expert."""
    received = all_to_all(counts, AXIS, 0, 0, tiled=True)
    send, receive = counts.sum(1), received.sum(1)
    begin, arrive = starts(send), starts(receive)
    there, back = all_to_all((arrive, begin), AXIS, 0, 0, tiled=True)
    room = x.new_zeros(counts.shape[0] * len(x), x.shape[1])  # if all rows of all ranks come here
    rows = ragged_all_to_all(x, room, begin, send, there, receive, axis_name=AXIS)
    position = torch.arange(len(room), device=x.device)
    piece = torch.searchsorted(received.flatten().cumsum(0), position, right=True)
    local = torch.where(position < receive.sum(), piece % counts.shape[1], counts.shape[1])
    results = run_experts(params, rows, local)
    return ragged_all_to_all(results, torch.zeros_like(x), arrive, receive, back, send, axis_name=AXIS)


def starts(sizes: Tensor) -> Tensor:
    """Where pieces of these sizes begin, one after the other."""
    return sizes.cumsum(0) - sizes


DISPATCHES: dict[str, Dispatch] = {"all_to_all": padded, "ragged": ragged}


def one_device_loss(config: Config) -> Callable[[Params, Batch], Tensor]:
    """The mean squared error of the layer on one device."""
    return lambda params, batch: (mixture(params, batch.tokens, config) - batch.targets).square().mean()


def sharded_loss(config: Config, dispatch: Dispatch, mesh: spmd.Mesh) -> Callable[[Params, Batch], Tensor]:
    """The same, of parameters and tokens that are spread over a mesh."""

    @spmd.shard_map(mesh=mesh, in_specs=(SPECS, P(AXIS)), out_specs=P())
    def loss(params: Params, batch: Batch) -> Tensor:
        error = local_mixture(params, batch.tokens, config, dispatch) - batch.targets
        return psum(error.square().sum(), AXIS) / (error.numel() * axis_size(AXIS))

    return loss


def make_step(loss: Callable[[Params, Batch], Tensor]) -> Callable[[State, Batch], Any]:
    """A training step for a loss: the new state, the loss and the gradients."""

    def step(state: State, batch: Batch) -> Any:
        grads, value = torch.func.grad_and_value(loss)(state.params, batch)
        return State(*OPTIMIZER.step(state.params, state.optimizer, grads)), value, grads

    return step


def train(mesh: spmd.Mesh, config: Config, dispatch: Dispatch, batches: list[Batch]) -> tuple[Any, list[Any]]:
    """Train from the first state on a mesh; the plan of a step, and the loss and gradients of every step."""
    step = spmd.jit(
        make_step(sharded_loss(config, dispatch, mesh)), (STATE_SPECS, P(AXIS)), (STATE_SPECS, P(), SPECS), mesh=mesh
    )
    state = spmd.distribute(init(config), STATE_SPECS, mesh)
    found = []
    for batch in batches:
        state, loss, grads = step(state, batch)
        found.append((loss, grads))
    return step.plan(state, batches[0]), found


def worst_difference(config: Config, batches: list[Batch], found: list[Any]) -> float:
    """The largest difference of losses and gradients from those of the same steps on one device."""
    step, state, worst = make_step(one_device_loss(config)), init(config), 0.0
    for batch, (loss, grads) in zip(batches, found, strict=True):
        state, single, expected = step(state, batch)
        pairs = zip((loss, *grads), (single, *expected), strict=True)
        worst = max(worst, *((got.full_tensor() - want).abs().max().item() for got, want in pairs))
    return worst


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status is 1 if losses or gradients are not one device's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dispatch", choices=DISPATCHES, default="ragged", help="how tokens are sent (ragged)")
    parser.add_argument(
        "--ranks", type=int, default=4, help="ranks in this process (4); torchrun's processes if it runs"
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a batch (256)")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    console, config = report.make_console(), Config()
    mesh = spmd.make_mesh({AXIS: spmd.process_count() if spmd.is_distributed() else options.ranks})
    for name, count in (("experts", config.experts), ("--tokens", options.tokens)):
        if count % mesh.size:
            parser.error(f"{name} must divide by the number of ranks (got {count} and {mesh.size})")
    batches = [make_batch(config, options.tokens, seed) for seed in range(options.steps)]
    plan, found = train(mesh, config, DISPATCHES[options.dispatch], batches)
    losses = [loss.item() for loss, _ in found]
    console.print(report.comms_table(plan))
    for number in range(0, options.steps, max(1, options.steps // 6)):
        console.print(f"step {number + 1} of {options.steps}: loss {losses[number]:.4f}")
    worst = worst_difference(config, batches, found)
    verdict = "within" if worst <= TOLERANCE else "NOT within"
    console.print(f"losses and gradients are {verdict} {TOLERANCE:.0e} of one device's ({worst:.1e})")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
