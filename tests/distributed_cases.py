"""What the ranks of tests/test_distributed.py run: functions that workers import."""

from __future__ import annotations

from typing import Any

import optree
import torch
from test_redistribute import all_specs, split

import gpt
import layouts
import training
from spmd.collectives.redistribute import redistribute_shards
from spmd.errors import SpmdError
from spmd.mesh import Mesh, make_mesh
from spmd.spec import DTensorSpec, TensorMeta
from spmd.testing.executed import Executed, ExecutedCollectives

CONFIG = gpt.Config(vocab=64, width=32, layers=1, heads=8, context=16)


def twins(axes: dict[str, int]) -> tuple[Mesh, Mesh]:
    """A distributed mesh, and a virtual one that says what must come out."""
    return make_mesh(axes, runtime="distributed"), make_mesh(axes, runtime="virtual")


def on(mesh: Mesh, spec: DTensorSpec) -> DTensorSpec:
    return DTensorSpec(mesh, spec.dims, spec.partial, spec.meta)


def error_of(function: Any, *args: Any, **keywords: Any) -> str:
    """The message of the error that a call must raise."""
    try:
        function(*args, **keywords)
    except SpmdError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{function} raised nothing")


def check_redistribution(mesh: Mesh, source: DTensorSpec, target: DTensorSpec, shards: Any) -> None:
    rank = mesh.rank(mesh.held_coordinates[0])
    expected = redistribute_shards(shards, source, target)[rank]
    (found,) = redistribute_shards([shards[rank]], on(mesh, source), on(mesh, target))
    assert torch.equal(expected, found), f"{source} -> {target}: {expected} {found}"
    assert expected.dtype == found.dtype and found.is_contiguous()


def redistribute_all_pairs(axes: dict[str, int], shape: tuple[int, ...]) -> int:
    mesh, virtual = twins(axes)
    generator = torch.Generator().manual_seed(0)
    specs = all_specs(virtual, TensorMeta(shape, torch.float32))
    for source in specs:
        for target in specs:
            check_redistribution(mesh, source, target, split(source, generator)[0])
    return len(specs) ** 2


def redistribute_one(axes: dict[str, int], source: DTensorSpec, target: DTensorSpec, shards: Any) -> None:
    check_redistribution(make_mesh(axes, runtime="distributed"), source, target, shards)


def train(name: str, axes: dict[str, int], runtime: str, steps: int) -> tuple[list[float], list[Any], list[Any], int]:
    """Losses of a strategy's steps; the collectives of the plan, those of a step, and the local bytes of parameters."""
    mesh = make_mesh(axes, runtime=runtime)
    setup = training.Training(CONFIG, layouts.STRATEGIES[name], mesh)
    state, step = setup.init(), setup.step()
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        batch = tuple(torch.randint(CONFIG.vocab, (8, CONFIG.context), generator=generator) for _ in range(2))
        with ExecutedCollectives() as executed:
            state, loss = step(state, batch)
        losses.append(loss.item())
    planned = [Executed(c.kind, mesh.axis_size(c.axes), c.bytes) for c in step.plan(state, batch).comms]
    local = sum(shard.nbytes for leaf in optree.tree_leaves(state.params) for shard in leaf.shards)
    return losses, planned, executed.found, local
