"""The training steps of `examples/` as programs of the proof."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # which are scripts, not a package

import gpt  # type: ignore[import-not-found]
import layouts  # type: ignore[import-not-found]
import llama  # type: ignore[import-not-found]
import megatron_mlp  # type: ignore[import-not-found]
import moe  # type: ignore[import-not-found]
import ring_attention  # type: ignore[import-not-found]
import spmd
import training  # type: ignore[import-not-found]
from proofs.memory_of_ranks.program import Case, Program, adamw_spec, case, empty, random_like
from spmd import P

EVEN = gpt.Config(vocab=128, width=128, heads=8, layers=2, context=32)
UNEVEN = gpt.Config(vocab=131, width=126, heads=6, layers=2, context=33)
"""Neither 2 nor 4 divides the vocabulary and the context, and 4 does not divide heads and width."""


def gpt_step(strategy: str, *, donate: bool = True, **options: Any) -> Program:
    """A training step of `examples/training.py`; `options` are further fields of its configuration."""

    def make(ranks: int, even: bool) -> Case:
        spread = layouts.STRATEGIES[strategy]
        config = attrs.evolve(EVEN if even else UNEVEN, **options)
        setup = training.Training(config, spread, spmd.make_mesh(spread.mesh_of(ranks)))
        tokens = empty(8 if even else 7, config.context, dtype=torch.int64)
        donated: dict[str, Any] = {"donate_argnums": 0} if donate else {}

        def arguments() -> tuple[Any, ...]:
            batch = random_like((tokens, tokens))
            return setup.init(), spmd.distribute(batch, layouts.batch_spec(setup.mesh), setup.mesh)

        return Case(lambda **more: setup.step(**donated, **more), arguments)

    return make


def llama_step(ranks: int, even: bool) -> Case:
    """A fully sharded training step of a small Llama."""
    config = llama.Config(131, 128, 8, 4, 257, 2, 33, torch.float32)
    if even:
        config = llama.Config(128, 128, 8, 4, 256, 2, 32, torch.float32)
    setup = llama.Training(config, spmd.make_mesh({"data": ranks}), 8 if even else 7)
    specs = llama.param_specs(config, None, "data")
    placed = ((specs, adamw_spec(specs)), P("data"))
    return Case(
        lambda **options: setup.step(donate_argnums=0, **options),
        lambda: spmd.distribute(random_like(setup.arguments()), placed, setup.mesh),
    )


def moe_step(dispatch: str) -> Program:
    """A training step of a mixture of experts by `shard_map`; only features can be uneven there."""

    def make(ranks: int, even: bool) -> Case:
        config = moe.Config(width=64, hidden=128) if even else moe.Config(width=61, hidden=127)
        mesh = spmd.make_mesh({moe.AXIS: ranks})
        step = moe.make_step(moe.sharded_loss(config, moe.DISPATCHES[dispatch], mesh))
        specs, out = (moe.STATE_SPECS, P(moe.AXIS)), (moe.STATE_SPECS, P(), moe.SPECS)
        start = (moe.init(config), moe.make_batch(config, 256, 0))
        return Case(
            lambda **options: spmd.jit(step, specs, out, mesh=mesh, **options),
            lambda: spmd.distribute(start, specs, mesh),
        )

    return make


def megatron_by_hand(ranks: int, even: bool) -> Case:
    """Megatron's MLP with its collective written by hand."""
    mesh = spmd.make_mesh(layouts.Strategy({"data": 2, "model": 4}).mesh_of(ranks))
    width, batch = (128, 256) if even else (127, 251)
    params = {"up": empty(width, 4 * width), "down": empty(4 * width, width)}
    x = empty(batch, width)
    specs = (megatron_mlp.SPECS, megatron_mlp.BATCH, megatron_mlp.BATCH)

    def step(params: Any, x: Any, target: Any) -> Any:
        return megatron_mlp.gradients(megatron_mlp.by_hand(mesh), params, x, target)

    return case(step, specs, (specs[:2], P()), mesh, (params, x, x))


def ring(ranks: int, even: bool) -> Case:
    """Gradients of causal ring attention, by permutations."""
    mesh, length = spmd.make_mesh({"seq": ranks}), 256 if even else 253
    attention = ring_attention.make_attention(mesh, length, causal=True)

    def step(qkv: tuple[Tensor, ...], target: Tensor) -> Any:
        return torch.func.grad_and_value(lambda qkv: ring_attention.distance(attention(*qkv), target))(qkv)

    specs = ((ring_attention.SEQUENCE,) * 3, ring_attention.SEQUENCE)
    q = empty(1, 4, length, 32)
    return case(step, specs, (specs[0], P()), mesh, ((q, q, q), q))


EXAMPLES: Mapping[str, Program] = {
    "gpt dp": gpt_step("dp"),
    "gpt fsdp": gpt_step("fsdp"),
    "gpt fsdp, state kept": gpt_step("fsdp", donate=False),
    "gpt fsdp, fused attention": gpt_step("fsdp", fused_attention=True),
    "gpt fsdp, bfloat16": gpt_step("fsdp", dtype=torch.bfloat16),
    "gpt dp, scan": gpt_step("dp", scan=True, layers=4),
    "gpt fsdp, scan": gpt_step("fsdp", scan=True, layers=4),
    "gpt sp, scan": gpt_step("sp", scan=True, layers=4),
    "gpt tp": gpt_step("tp"),
    "gpt sp": gpt_step("sp"),
    "gpt dp_tp": gpt_step("dp_tp"),
    "gpt fsdp_tp": gpt_step("fsdp_tp"),
    "llama fsdp": llama_step,
    "moe all_to_all": moe_step("all_to_all"),
    "moe ragged": moe_step("ragged"),
    "megatron by hand": megatron_by_hand,
    "ring attention": ring,
}
