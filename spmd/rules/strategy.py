"""From factors to strategies: the ways to run one operator sharded over one mesh axis.

Placements of a strategy speak of *logical* dims: every dim of a tensor is made of factors, and every factor of atoms
(section 6 of the design), so a `[b * s, d]` operand of two atoms in its first dim has logical shape `[b, s, d]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.errors import RuleError
from spmd.rules.rule import Body, FactorDims, Factors, Row

Atoms: TypeAlias = Mapping[str, tuple[int, ...]]
"""The sizes of the atoms of each factor, major first."""

LogicalShape: TypeAlias = tuple[tuple[int, ...], ...]
"""For each physical dim of a tensor, the sizes of its atoms, major first."""


LOCAL_BODY = "local body"
"""The label of a strategy from a written-out row with a body, which depends on the dims that the row shards."""


@attrs.frozen
class Strategy:
    """A placement on one mesh axis for every tensor operand and result of an operator, over logical dims.

    `label` names the factor that is sharded (`"i"`, `"i.1"` for its second atom), or says `"replicate"`, `"partial"`
    or `"local body"`.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    body: Body | None = None
    label: str = "replicate"


def whole_factors(factors: Factors) -> Atoms:
    """The atoms of a call on its own: one a factor."""
    return {name: (size,) for name, size in factors.sizes.items()}


def derive_strategies(
    factors: Factors,
    atoms: Atoms | None = None,
    logical: tuple[Sequence[LogicalShape], Sequence[LogicalShape]] | None = None,
) -> tuple[Strategy, ...]:
    """All strategies of a call on one mesh axis, replication first.

    Args:
        factors: the call's factors.
        atoms: how each factor is refined; by default each factor is one atom.
        logical: the logical shapes of the operands and of the results, where they are known; a dim whose atoms are
            not those of its factors cannot be sharded.

    Raises:
        RuleError: a factor of an operand that is in no result and neither reduced nor replicated.
    """
    atoms = whole_factors(factors) if atoms is None else atoms
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
    rows = (_logical_row(row, tensors) for row in factors.rows)
    return tuple(dict.fromkeys([*strategies, *(row for row in rows if row is not None)]))


_LogicalDims: TypeAlias = tuple[tuple[tuple[str, int] | None, ...], ...]
"""For each physical dim, its atoms as (factor, index); a None stands for an atom that cannot be sharded."""


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
    """The factors of dims whose atoms are not theirs."""
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


def _logical_row(row: Row, tensors: Sequence[_LogicalDims]) -> Strategy | None:
    """A written-out row over logical dims; None where it shards a dim of several atoms."""
    placements: list[Placement] = []
    for placement, dims in zip((*row.operands, *row.results), tensors, strict=True):
        if isinstance(placement, Shard):
            if len(dims[placement.dim]) != 1:
                return None
            placement = Shard(sum(len(group) for group in dims[: placement.dim]))
        placements.append(placement)
    count = len(row.operands)
    label = "partial" if row.body is None else LOCAL_BODY
    return Strategy(tuple(placements[:count]), tuple(placements[count:]), row.body, label)
