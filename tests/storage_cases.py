"""What the storages of results hold: functions that workers import."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

import gpt
import layouts
import spmd
import training
from spmd import P
from spmd.core.mesh import Mesh, Runtime, make_mesh
from spmd.core.pytree import tree_leaves

CONFIG = gpt.Config(vocab=64, width=32, layers=1, heads=8, context=16)
SPECS = (P(), P("x"), P(None, "x"), P("y"), P("x", "y"), P(("x", "y")), P(("y", "x")), P(None, ("x", "y")))
SHAPES = ((5, 7), (8, 8), (1, 3), (3, 0))
FACTORIES = {
    "zeros": spmd.zeros,
    "ones": spmd.ones,
    "empty": spmd.empty,
    "rand": spmd.rand,
    "randn": spmd.randn,
    "full": lambda *size, **options: spmd.full(size, 2.0, **options),
    "zeros_like": lambda *size, **options: spmd.zeros_like(torch.empty(size, device="meta"), **options),
    "rand_like": lambda *size, **options: spmd.rand_like(torch.empty(size, device="meta"), **options),
    "randn_like": lambda *size, **options: spmd.randn_like(torch.empty(size), **options),
}


def shards_of(tree: Any) -> list[torch.Tensor]:
    return [shard for leaf in tree_leaves(tree) for shard in getattr(leaf, "shards", ())]


def excess(results: Any, *given: Any) -> int:
    """The bytes that the storages of results hold beyond the results' own; those of arguments do not count."""
    shards = shards_of(results)
    aside = {shard.untyped_storage()._cdata for shard in shards_of(given)}
    storages = {shard.untyped_storage()._cdata: shard.untyped_storage().nbytes() for shard in shards}
    held = sum(nbytes for storage, nbytes in storages.items() if storage not in aside)
    return max(held - sum(shard.nbytes for shard in shards), 0)


def halves(mesh: Mesh, given: Any) -> Iterator[tuple[str, Any, Any]]:
    """Functions under jit: name, result, and the arguments."""

    def jitted(function: Callable[..., Any], spec: P) -> Any:
        return spmd.jit(function, (P(),), spec, mesh=mesh)(given)

    for spec in SPECS:
        yield f"identity {spec}", jitted(lambda x: x, spec), ()
        yield f"drawn {spec}", jitted(lambda x: [torch.randn_like(x) for _ in range(2)], spec), given
        yield f"computed {spec}", jitted(lambda x: x.exp(), spec), given
        yield f"transposed {spec}", jitted(lambda x: x.exp().t(), P()), given
        yield f"two uses {spec}", jitted(lambda x: (x.exp(), x.exp().sin().sum(0)), (spec, P())), given
    yield "a part", jitted(lambda x: x.exp()[:1], P()), given
    yield "one of three", jitted(lambda x: torch.cat([x, x, x]).exp().chunk(3)[1], P()), given
    yield "all of three", jitted(lambda x: torch.cat([x, x, x]).exp().chunk(3), P()), given
    yield "two of three", jitted(lambda x: torch.cat([x, x, x]).exp().chunk(3)[:2], P()), given
    yield "a copy among views", jitted(lambda x: (y := x.exp().t().contiguous(), y.t().reshape(-1)[1:]), P()), given
    table = torch.arange(24.0, device=mesh.device)
    yield "of a constant", jitted(lambda x: (table[2:5], x + 1), P()), given


def moves(mesh: Mesh, whole: torch.Tensor) -> Iterator[tuple[str, Any, Any]]:
    """Moves of DTensors; what is redistributed holds nothing of its argument that it does not show."""
    for source, target in itertools.product(SPECS, SPECS):
        x = spmd.distribute(whole, source, mesh)
        yield f"distribute {source}", x, ()
        moved = x.redistribute(target)
        yield f"redistribute {source} -> {target}", moved, x if moved is x else ()
        waited = x.redistribute(target, async_op=True)
        yield f"async {source} -> {target}", waited, x if waited is x else ()


def results_hold_their_own(shapes: int, mesh: Mesh) -> int:
    """Check all calls on a mesh, for so many shapes; returns how many."""
    torch.manual_seed(0)  # alike on all ranks, whatever these have drawn before
    found = []
    for shape, spec, (name, factory) in itertools.product(SHAPES[:shapes], SPECS, FACTORIES.items()):
        found.append((f"{name} {shape} {spec}", factory(*shape, spec=spec, mesh=mesh), ()))
    for spec in (P(), P("x"), P(("y", "x"))):
        found += [(f"arange {spec} {dtype}", spmd.arange(9, spec=spec, mesh=mesh, dtype=dtype), ()) for dtype in DTYPES]
    for shape in SHAPES[:shapes]:
        whole = torch.randn(shape, device=mesh.device)
        found += moves(mesh, whole)
        found += halves(mesh, spmd.distribute(whole, P(), mesh))
    wrong = [f"{name}: {over} bytes" for name, result, given in found if (over := excess(result, given))]
    assert not wrong, "\n".join(wrong)
    return len(found)


DTYPES = (torch.int64, torch.float32)


def an_initialization_holds_one_whole_tensor(mesh: Mesh) -> tuple[int, int]:
    """What the results of a sharded initialization hold, and the peak of its plan, in shards of one tensor."""

    def init() -> list[torch.Tensor]:
        return [torch.randn(64, 64) for _ in range(6)]

    step = spmd.jit(init, (), P("x"), mesh=mesh)
    results = step()
    held = sum({s.untyped_storage()._cdata: s.untyped_storage().nbytes() for s in shards_of(results)}.values())
    (shard, *_) = results[0].shards
    return held // shard.nbytes, step.plan().memory.peak // shard.nbytes


def examples_hold_their_own(axes: dict[str, int], runtime: Runtime) -> list[str]:
    """Check two steps of the training example by each strategy for such a mesh; returns the strategies."""
    mesh = make_mesh(axes, runtime=runtime)
    names = [name for name, s in layouts.STRATEGIES.items() if s.mesh_of(math.prod(axes.values())) == axes]
    for name in names:
        setup = training.Training(CONFIG, layouts.STRATEGIES[name], mesh)
        state, step = setup.init(), setup.step()
        assert excess(state) == 0, f"{name}: the first state"
        for _ in range(2):
            batch = tuple(torch.randint(CONFIG.vocab, (5, CONFIG.context)) for _ in range(2))
            results = step(state, batch)
            assert excess(results, state) == 0, f"{name}: a step"
            state = results[0]
    return names
