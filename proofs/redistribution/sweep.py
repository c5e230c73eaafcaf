"""The comparison of all pairs of specs of a mesh: with the optimum, with torch, and values with those of one device."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from proofs.redistribution.optimum import Cost, cost_of, optima
from proofs.redistribution.torch_counts import fake_mesh, torch_cost
from spmd.api.values.dtensor import wrap
from spmd.collectives.resharding import eager_redistribution, redistribution
from spmd.core.mesh import Mesh
from spmd.core.placement import Reduction
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.testing.specs import every_spec, random_shards

SLACK = 1e-6
"""What sums of bytes may differ by when they are added in another order, as a part of them."""


@attrs.define
class Found:
    """What all pairs of specs of one mesh and one tensor have in common.

    Args:
        pairs: the number of pairs.
        above: how many cost more than the optimum outside of a program, by whether the target is partial; and how many
            send more in a program than the optimum without exchanges of as many collectives.
        excess: the greatest ratio of a price to the optimum's outside of a program.
        ours, theirs: the sums of bytes and of collectives, of the pairs that torch has.
        against: of those pairs, how many have fewer, as many or more than torch: `("bytes", -1)` and so on.
        refused: how many torch refuses.
        dominated: pairs for which torch sends no more bytes in no more collectives, and less of one of them.
        traded: how many pairs there are of each form for which torch has less of one and more of the other, with the
            costs.
    """

    pairs: int = 0
    above: Counter[str] = attrs.field(factory=Counter)
    excess: float = 1.0
    ours: Counter[str] = attrs.field(factory=Counter)
    theirs: Counter[str] = attrs.field(factory=Counter)
    against: Counter[tuple[str, int]] = attrs.field(factory=Counter)
    refused: int = 0
    dominated: int = 0
    traded: Counter[tuple[str, Cost, Cost]] = attrs.field(factory=Counter)


def compare(mesh: Mesh, meta: TensorMeta, every: int = 1) -> Found:
    """Compare the costs of all pairs with the optimum and with torch's; `every` fifth source, if that is 5."""
    specs, found = every_spec(mesh, meta), Found()
    least, in_program = (optima(specs, eager=eager).tolist() for eager in (True, False))
    with fake_mesh(mesh) as theirs:
        for row, source in list(enumerate(specs))[::every]:
            for column, target in enumerate(specs):
                cost = cost_of(eager_redistribution(source, target), eager=True)
                planned = cost_of(redistribution(source, target), eager=False)
                found.pairs += 1
                best = least[row][column][-1]
                if cost.price > best * (1 + SLACK):
                    found.above["partial" if target.partial else "complete"] += 1
                    found.excess = max(found.excess, cost.price / best)
                found.above["program"] += planned.price > in_program[row][column][planned.count] * (1 + SLACK)
                _count(found, source, target, cost, torch_cost(theirs, source, target))
    return found


def _count(found: Found, source: DTensorSpec, target: DTensorSpec, ours: Cost, theirs: Cost | None) -> None:
    if theirs is None:
        found.refused += 1
        return
    signs = {}
    for name in ("bytes", "count", "price"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        signs[name] = 0 if abs(mine - other) <= SLACK * other else -1 if mine < other else 1
        found.ours[name] += mine
        found.theirs[name] += other
        found.against[name, signs[name]] += 1
    both = {signs["bytes"], signs["count"]}
    found.dominated += both in ({1}, {0, 1})
    if {-1, 1} == both:
        found.traded[form(source, target), ours, theirs] += 1


def form(source: DTensorSpec, target: DTensorSpec) -> str:
    """A pair with its axes, dims and reductions renamed: equal for pairs that differ in nothing else."""
    names, dims = source.mesh.names, range(source.meta.ndim)
    kinds: tuple[Reduction, ...] = ("sum", "max")
    texts = []
    renamings = itertools.permutations(names), itertools.permutations(dims), itertools.permutations(kinds)
    for axes, order, ops in itertools.product(*renamings):
        axis, op = dict(zip(names, axes, strict=True)), dict(zip(kinds, ops, strict=True))
        ends = (
            P(
                *(tuple(axis[name] for name in spec.dims[dim]) for dim in order),
                partial={axis[name]: op[kind] for name, kind in spec.partial},
            )
            for spec in (source, target)
        )
        texts.append(" -> ".join(map(repr, ends)))
    return min(texts, key=lambda text: (len(text), text.count("max"), text))


def wrong(mesh: Mesh, meta: TensorMeta, every: int = 1) -> Iterator[str]:
    """The pairs whose value or gradient is not that of one device; `every` as in `compare`."""
    generator = torch.Generator().manual_seed(0)
    specs = every_spec(mesh, meta)
    for source in specs[::every]:
        shards, whole = random_shards(source, generator)
        value = wrap(source, tuple(shards))
        weight = torch.randint(-9, 10, meta.shape, generator=generator).to(meta.dtype)
        for target in specs:
            leaf: Any = value.detach().requires_grad_()
            moved = leaf.redistribute(target)
            shapes = [tuple(shard.shape) for shard in moved.shards]
            (moved.full_tensor() * weight).sum().backward()
            right = (
                moved.spec == target
                and shapes == [target.local_shape(where) for where in mesh.coordinates()]
                and torch.equal(moved.full_tensor(), whole)
                and leaf.grad is not None
                and leaf.grad.spec == source.complete
                and torch.equal(leaf.grad.full_tensor(), weight)
            )
            if not right:
                yield f"{source} -> {target.pspec!r} on {mesh}"
