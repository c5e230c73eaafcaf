"""From factors to strategies: the ways to run one operator sharded over one mesh axis.

A dim of a tensor is a product of factors, and a factor a product of *atoms*: the smallest parts that can be sharded on
their own, chosen so that they agree for all dims that a program relates (`spmd.plan.search.atoms`). Placements of a
strategy refer to *logical* dims, one per atom: a `[b * s, d]` operand whose first dim has two atoms has the logical
shape `[b, s, d]`. The dims of the tensor itself are *physical* dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from spmd.collectives.blocks import sharded_in_blocks
from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.errors import RuleError
from spmd.ir.call import Call
from spmd.rules.nested import Along
from spmd.rules.rule import Axes, Body, FactorDims, Factors, Row

Atoms: TypeAlias = Mapping[str, tuple[int, ...]]
"""The sizes of the atoms of each factor, major first."""

LogicalShape: TypeAlias = tuple[tuple[int, ...], ...]
"""For each physical dim of a tensor, the sizes of its atoms, major first."""


LOCAL_BODY = "local body"
"""The label of a strategy from a `Row` with a local implementation, which depends on the dims that the row shards."""

MANUAL = "manual"
"""The label of the only strategy of an operation in a region that is manual along the axis: it runs as it stands, and
its tensors, which are what one rank holds, count as replicated."""


@attrs.frozen
class Strategy:
    """A placement on one mesh axis for every tensor operand and result of an operator, over logical dims.

    `body` is the local implementation; without one, the operator itself runs on the local tensors. `label` names the
    factor that is sharded (`"i"`, `"i.1"` for its second atom), or is `"replicate"`, `"partial"`, `"separate"`,
    `"manual"` or `"local body"`.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    body: Body | None = None
    label: str = "replicate"


def unrefined_atoms(factors: Factors) -> Atoms:
    """The atoms of a call that is not part of a program: each factor is one atom."""
    return {name: (size,) for name, size in factors.sizes.items()}


def derive_strategies(
    factors: Factors,
    atoms: Atoms | None = None,
    logical: tuple[Sequence[LogicalShape], Sequence[LogicalShape]] | None = None,
) -> tuple[Strategy, ...]:
    """All strategies of a call on one mesh axis, replication first.

    Args:
        factors: the call's factors.
        atoms: the sizes of the atoms of each factor, major first; by default each factor is one atom.
        logical: the logical shapes of the operands and of the results, where they are known; a dim whose atoms are
            not those of its factors cannot be sharded.

    Returns:
        Replication, then one strategy for each atom longer than 1, then those of the factors' `rows`; no two are equal.

    Raises:
        RuleError: an operand has a factor that a result lacks, and that is not reduced, replicated or independent and
            has no local implementation.
    """
    atoms = unrefined_atoms(factors) if atoms is None else atoms
    dims = (*factors.operands, *factors.results)
    known = (None,) * len(dims) if logical is None else (*logical[0], *logical[1])
    tensors = [_logical_dims(dims, atoms, shape) for dims, shape in zip(dims, known, strict=True)]
    fixed = factors.replicate | _opaque_factors(dims, tensors)
    strategies = [Strategy((Replicate(),) * len(factors.operands), (Replicate(),) * len(factors.results))]
    for name in factors.sizes:
        if name not in fixed:
            sizes = atoms[name]
            cut = (index for index, size in enumerate(sizes) if size > 1)
            strategies += (_shard_atom(factors, tensors, (name, index), len(sizes)) for index in cut)
    if factors.separate:
        strategies = _combined(strategies)
    shapes = [_sizes(*each, atoms) for each in zip(dims, known, strict=True)]
    rows = (_logical_row(row, shapes) for row in factors.rows)
    return tuple(dict.fromkeys([*strategies, *(row for row in rows if row is not None)]))


def _combined(strategies: Sequence[Strategy]) -> list[Strategy]:
    """All combinations of the placements of operands that some strategies have, in an operator without sharded results.

    The first one, replication, stays the first.
    """
    choices = map(dict.fromkeys, zip(*(strategy.operands for strategy in strategies), strict=True))
    _, *others = itertools.product(*choices)
    results = strategies[0].results
    return [strategies[0], *(Strategy(operands, results, label="separate") for operands in others)]


_LogicalDims: TypeAlias = tuple[tuple[tuple[str, int] | None, ...], ...]
"""For each physical dim, its atoms as (factor, index); None for an atom that cannot be sharded."""


def _logical_dims(dims: FactorDims, atoms: Atoms, logical: LogicalShape | None) -> _LogicalDims:
    found: list[tuple[tuple[str, int] | None, ...]] = []
    for position, names in enumerate(dims):
        entries = tuple((name, index) for name in names for index in range(len(atoms[name])))
        expected = logical[position] if logical is not None else None
        if expected is not None and tuple(atoms[name][index] for name, index in entries) != expected:
            found.append((None,) * len(expected))
        else:
            found.append(entries or (None,))
    return tuple(found)


def _opaque_factors(dims: Sequence[FactorDims], logical: Sequence[_LogicalDims]) -> frozenset[str]:
    """The factors of dims whose atoms are not those of their factors."""
    return frozenset(
        name
        for tensor, entries in zip(dims, logical, strict=True)
        for names, atoms in zip(tensor, entries, strict=True)
        if None in atoms
        for name in names
    )


def _shard_atom(factors: Factors, tensors: Sequence[_LogicalDims], atom: tuple[str, int], count: int) -> Strategy:
    name, index = atom
    in_operand = any(name in names for dims in factors.operands for names in dims)

    def place(dims: _LogicalDims, otherwise: Placement) -> Placement:
        flat = [entry for group in dims for entry in group]
        return Shard(flat.index(atom)) if atom in flat else otherwise

    missing = [dims for dims in factors.results if not any(name in names for names in dims)]
    known = factors.reduce.keys() | factors.bodies.keys() | factors.independent
    if missing and in_operand and name not in known:
        raise RuleError(f"Factor {name!r} is in no result and neither reduced nor replicated (in {factors}).")
    absent: Placement = Partial(factors.reduce[name]) if name in factors.reduce else Replicate()
    operands, results = tensors[: len(factors.operands)], tensors[len(factors.operands) :]
    return Strategy(
        tuple(place(dims, absent if i in factors.additive else Replicate()) for i, dims in enumerate(operands)),
        tuple(place(dims, absent) for dims in results),
        factors.bodies.get(name),
        label=name if count == 1 else f"{name}.{index}",
    )


def _sizes(dims: FactorDims, logical: LogicalShape | None, atoms: Atoms) -> LogicalShape:
    """The logical shape of a tensor, from its factors where it is not known; of an unknown length stands a 0."""
    if logical is not None:
        return logical
    return tuple(tuple(size for name in names for size in atoms[name]) or (0,) for names in dims)


@attrs.frozen
class _InBlocks:
    """A local implementation for an operand whose sharded dim consists of blocks: its outermost atom is sharded."""

    body: Body
    size: int

    def __call__(self, axes: Axes, call: Call, *args: Any, **kwargs: Any) -> Any:
        with sharded_in_blocks(self.size):
            return self.body(axes, call, *args, **kwargs)


def _logical_row(row: Row, shapes: Sequence[LogicalShape]) -> Strategy | None:
    """A `Row` as a strategy over logical dims.

    A dim of several atoms is sharded in its outermost one, which makes chunks of whole blocks: None if the row has no
    local implementation, or a result is sharded, too, whose chunks would differ from those that it expects.
    """
    placements: list[Placement] = []
    blocks: set[int] = set()
    for placement, dims in zip((*row.operands, *row.results), shapes, strict=True):
        if isinstance(placement, Shard):
            blocks.add(math.prod(dims[placement.dim][1:]))
            placement = Shard(sum(len(group) for group in dims[: placement.dim]))
        placements.append(placement)
    count, body = len(row.operands), row.body
    if blocks and blocks != {1}:
        if body is None or len(blocks) > 1:
            return None
        if isinstance(body, Along) and body.block is not None:
            body = attrs.evolve(body, block=blocks.pop())
        elif any(isinstance(placement, Shard) for placement in row.results):
            return None
        else:
            body = _InBlocks(body, blocks.pop())
    label = "partial" if body is None else LOCAL_BODY
    return Strategy(tuple(placements[:count]), tuple(placements[count:]), body, label)
