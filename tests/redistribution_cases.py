"""What the ranks of tests/runtime/test_redistribute.py run: functions that workers import."""

from __future__ import annotations

import random
from typing import Any

import torch

import spmd
from spmd import P
from spmd.collectives.block_exchange import BlockExchange
from spmd.collectives.resharding import eager_redistribution
from spmd.collectives.step import Step
from spmd.core.mesh import Mesh, make_mesh
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.runtime.redistribute import redistribute_shards
from spmd.testing.live import LiveBytes
from spmd.testing.specs import every_spec, random_shards


def on(mesh: Mesh, spec: DTensorSpec) -> DTensorSpec:
    return DTensorSpec(mesh, spec.dims, spec.partial, spec.meta)


def random_pairs(axes: dict[str, int], shape: tuple[int, ...], count: int) -> float:
    """Redistribute as the virtual mesh does, within the bytes stated; the most bytes as a part of the limit."""
    mesh = make_mesh(axes, runtime="distributed")
    virtual, draw = make_mesh(axes, runtime="virtual"), random.Random(str((axes, shape)))
    specs, generator = every_spec(virtual, TensorMeta(shape, torch.int32)), torch.Generator().manual_seed(0)
    rank, most = mesh.rank(mesh.held_coordinates[0]), 0.0
    for source, target in (draw.choices(specs, k=2) for _ in range(count)):
        shards, _ = random_shards(source, generator)
        expected, held = redistribute_shards(shards, source, target)[rank], shards[rank].clone()
        with LiveBytes([held]) as live:
            (found,) = redistribute_shards([held], on(mesh, source), on(mesh, target))
        assert torch.equal(expected, found) and found.is_contiguous(), f"{source} -> {target}"
        limit = held.nbytes + max((needs(step, rank) for step in eager_redistribution(source, target)), default=0)
        assert live.peak <= limit, f"{source} -> {target}: {live.peak} bytes, beyond {limit}"
        most = max(most, live.peak / limit if limit else 0.0)
    return most


def needs(step: Step | BlockExchange, rank: int) -> int:
    """The bytes of a step on a rank: its operand, its result, and twice what it sends and receives, padded."""
    where = step.source.mesh.coordinate(rank)
    itemsize = step.source.meta.dtype.itemsize
    operand, result = (
        TensorMeta(spec.local_shape(where), spec.meta.dtype).nbytes for spec in (step.source, step.target)
    )
    if isinstance(step, BlockExchange):
        sent = sum(block.numel for block in step.sent_by(rank)) * itemsize
        received = sum(block.numel for block in step.received_by(rank)) * itemsize
        return operand + 3 * result + 2 * (sent + received)  # two parts and their reduction, while one is added
    largest = max(step.source.local_bytes(), step.target.local_bytes())
    ranks = step.source.mesh.axis_size(step.axes)
    gathers = step.kind in ("all_gather", "reduce_scatter")
    padded = ranks * min(step.source.local_bytes(), step.target.local_bytes()) if gathers else largest
    return operand + result + 2 * (padded + largest) if step.is_collective else operand + result


X = torch.arange(55.0).view(11, 5)


def meshes(mesh: Mesh) -> list[Mesh]:
    """Other axes over the same ranks, two ranks of them, and as many in another order where meshes can say so."""
    runtime = mesh.runtime.value
    if runtime == "virtual":
        return [make_mesh({"d": 2, "m": 2}, runtime=runtime), make_mesh({"h": 2}, runtime=runtime)]
    return [
        make_mesh({"d": 2, "m": 2}, runtime=runtime),
        make_mesh({"d": 2, "m": 2}, runtime=runtime, ranks=(3, 1, 0, 2)),
        make_mesh({"h": 2}, runtime=runtime, ranks=(3, 1)),
        mesh["x"] if mesh.names != ("x",) else mesh,
    ]


def cross_meshes(mesh: Mesh) -> None:
    """There and back between a mesh of four ranks and others, with gradients."""
    here = [P("x"), P(None, "x"), P(), P(partial={"x": "sum"}), P(partial={"x": "max"})]
    for other in meshes(mesh):
        axes = other.names
        for there in (
            P(axes[-1]),
            P(None, axes),
            P(axes[::-1]),
            P(),
            P(axes[0], partial={axes[-1]: "sum"} if axes[1:] else {}),
        ):
            for number, spec in enumerate(here):
                x = spmd.distribute(X, spec, mesh).requires_grad_()
                y = x.redistribute(there, mesh=other)
                assert (y.mesh, y.spec.pspec) == (other, there)
                if other.runtime.value == "virtual" or spmd.process_index() in other.ranks:
                    assert torch.equal(X, y.full_tensor())
                z = y.redistribute(DTensorSpec.make(mesh, here[number - 1], y.spec.meta))
                assert torch.equal(X, z.full_tensor())
                (z.full_tensor() * X).sum().backward()
                assert x.grad.spec == x.spec.complete and torch.equal(X, x.grad.full_tensor())


def stay_outside() -> list[str]:
    """The errors of the ranks that a value has left."""
    mesh = make_mesh({"x": 4}, runtime="distributed")
    part = make_mesh({"h": 2}, runtime="distributed", ranks=(3, 1))
    y = spmd.distribute(X, P("x"), mesh).redistribute(P("h"), mesh=part)
    if spmd.process_index() in part.ranks:
        return [repr(y)]
    return [repr(y), *map(error_of, (y.to_local, y.full_tensor, lambda: y + 1, lambda: y.redistribute(P())))]


def error_of(call: Any) -> str:
    try:
        call()
    except spmd.SpmdError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")
