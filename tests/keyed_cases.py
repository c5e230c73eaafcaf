"""Draws by keys as jitted functions on a mesh: what the tests of both runtimes compare with one device."""

from __future__ import annotations

from itertools import permutations, product

import torch
from torch import Tensor

import spmd
from spmd import Mesh, P
from spmd.core.placement import Replicate, Shard

KEY = spmd.random.key(11)


def every_spec(mesh: Mesh, ndim: int = 2) -> list[P]:
    """All specs without pending sums of a tensor of so many dims, in any order of the axes that share a dim."""
    found = []
    for placed in product((Replicate(), *map(Shard, range(ndim))), repeat=len(mesh.axes)):
        shared = [
            [axis for axis, where in zip(mesh.axes, placed, strict=True) if where == Shard(d)] for d in range(ndim)
        ]
        found += [P(*orders) for orders in product(*(permutations(axes) for axes in shared))]
    return found


def drawn(key: spmd.random.Key, shape: tuple[int, ...], kind: str) -> Tensor:
    """A draw of a kind, as bits where it has them."""
    if kind == "bits":
        return spmd.random.bits(key, shape).view(torch.int32)
    if kind == "bytes":
        return spmd.random.bits(key, shape, torch.uint8)
    if kind == "dropout":
        return spmd.random.dropout(key, torch.ones(shape), 0.3)
    if kind == "double":
        return spmd.random.normal(key, shape, torch.float64)
    draw = getattr(spmd.random, kind)
    return draw(key, shape)  # type: ignore[no-any-return]


def draws_by_spec(shape: tuple[int, ...], kind: str, impl: str, mesh: Mesh) -> tuple[list[Tensor], float]:
    """A draw for each spec of its result, by keys of its own, and the bytes that the program sends."""
    specs = every_spec(mesh, len(shape))
    key = spmd.random.wrap_key_data(KEY.data, impl=impl)
    draws = spmd.jit(lambda key: all_draws(key, len(specs), shape, kind), None, specs, mesh=mesh)
    sent = sum(comm.bytes for comm in draws.plan(key).comms)
    return [found.full_tensor() for found in draws(key)], sent


def all_draws(key: spmd.random.Key, count: int, shape: tuple[int, ...], kind: str) -> list[Tensor]:
    """Draws by different keys."""
    return [drawn(spmd.random.fold_in(key, number), shape, kind) for number in range(count)]


def draws_on_processes(mesh: Mesh) -> list[list[float]]:
    """Draws of several kinds, in a loop, by a batch of keys, and of a DTensor outside of programs."""

    def step(key: spmd.random.Key, _: None) -> tuple[spmd.random.Key, Tensor]:
        key, own = spmd.random.split(key)
        return key, spmd.random.normal(own, (5, 3))

    def draws(key: spmd.random.Key) -> list[Tensor]:
        keys = spmd.random.split(key, 3)
        looped = spmd.scan(step, keys[0], None, length=3)[1]
        batched = torch.func.vmap(lambda key: spmd.random.uniform(key, (5,)))(keys)
        return [looped, batched, spmd.random.permutation(keys[1], 11)]

    found = spmd.jit(draws, None, [P(None, "data"), P(None, "data"), P("data")], mesh=mesh)(KEY)
    values = spmd.distribute(torch.ones(7), P("data"), mesh)
    found = [*found, spmd.random.dropout(KEY, values, 0.5)]
    return [value.full_tensor().flatten().tolist() for value in found]
