"""Which values of a region leave it, brought to types and shapes that can, and with which layouts."""

from __future__ import annotations

from collections.abc import Sequence

from proofs.shard_map_fuzz import letters as types
from proofs.shard_map_fuzz.builder import Builder
from proofs.shard_map_fuzz.program import Collective, Layout, Local
from proofs.shard_map_fuzz.reference import leave


def leaving(inner: Builder, params: Sequence[str], axes: Sequence[str], check: bool) -> tuple[list[str], list[Layout]]:
    """Results of a region, brought to types that can leave it, and their layouts."""
    own = {target for step in inner.steps for target in step.targets}
    chosen: list[str] = []
    for _ in range(inner.rng.randint(1, 3)):
        name = inner.pick(lambda name: name not in chosen and name in own)
        chosen.append(name or inner.pick(among=params) or params[0])
    settled = _settled_uneven if inner.is_uneven else _settled
    layouts, results = [], []
    for name in dict.fromkeys(chosen):
        result, layout = settled(inner, name, axes, check)
        results.append(result)
        layouts.append(layout)
    return results, layouts


def _settled(inner: Builder, name: str, axes: Sequence[str], check: bool) -> tuple[str, Layout]:
    """A value as one that can leave: varying along axes that shard a dim of it, invariant along others, or partial."""
    rng = inner.rng
    dims: list[tuple[str, ...]] | None = None
    partial: list[str] = []
    for axis in rng.sample(list(axes), len(axes)):
        held = inner.letters[name][axis]
        if held == "U":
            if rng.random() < 0.5 and inner.level == 1:
                partial.append(axis)
            else:
                name = _summed(inner, name, axis)
            continue
        if held == "I" and rng.random() < 0.85:
            continue
        if held == "V" and not check and rng.random() < 0.4 and not types.has_unreduced(inner.letters[name]):
            continue
        if inner.ndim(name) == 0 or (held == "V" and rng.random() < 0.25):
            if held != "I":
                name = _summed(inner, name, axis)
            continue
        dims = dims or [() for _ in range(inner.ndim(name))]
        dim = rng.randrange(len(dims))
        dims[dim] = (*dims[dim], axis)
    return name, Layout(tuple(dims or ()), tuple(partial))


def _settled_uneven(inner: Builder, name: str, axes: Sequence[str], check: bool) -> tuple[str, Layout]:
    """As `_settled`, for ranks with unequal shapes: sharded where these are the blocks of one value, else its sum."""
    rng = inner.rng
    partial = [axis for axis in axes if inner.letters[name][axis] == "U" and rng.random() < 0.5 and inner.level == 1]
    for axis in axes:
        held, share = inner.letters[name][axis], 0.25 if inner.letters[name][axis] == "V" else 1.0
        if held in "UV" and axis not in partial and not inner.differing(name, [axis]) and rng.random() < share:
            name = _summed(inner, name, axis)
    for _ in range(8):
        layout = _guessed(inner, name, axes, check, partial)
        if layout is not None and _fits(inner, name, layout, axes):
            return name, layout
    total = inner.fresh()
    inner.force(Local(total, f"{total} = {name}.sum()", (name,)), inner.letters[name])
    return _settled(inner, total, axes, check)


def _guessed(inner: Builder, name: str, axes: Sequence[str], check: bool, partial: Sequence[str]) -> Layout | None:
    """A layout of a value, sharded along the axes where it varies, on dims whose lengths differ along them."""
    rng = inner.rng
    dims: list[tuple[str, ...]] = [() for _ in range(inner.ndim(name))]
    for axis in rng.sample(list(axes), len(axes)):
        held, differing = inner.letters[name][axis], inner.differing(name, [axis])
        if axis in partial or (held == "I" and not differing and rng.random() < 0.85):
            continue
        droppable = held == "V" and not check and not differing and not types.has_unreduced(inner.letters[name])
        if droppable and rng.random() < 0.4:
            continue
        if not dims and held != "I":
            return None
        if dims:
            dim = rng.choice(differing or range(len(dims)))
            dims[dim] = (*dims[dim], axis)
    return Layout(tuple(dims), tuple(partial))


def _fits(inner: Builder, name: str, layout: Layout, axes: Sequence[str]) -> bool:
    try:
        leave(inner.values[name], layout, inner.ranks, axes)
    except (RuntimeError, ValueError):
        return False
    return True


def _summed(inner: Builder, name: str, axis: str) -> str:
    """The psum of a value along an axis, whatever its size."""
    target = inner.fresh()
    found = types.changed(inner.letters[name], [axis], "I")
    inner.force(Collective(target, "psum", (name,), (axis,)), found)
    return target
