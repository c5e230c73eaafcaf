"""One random step of a block: local torch code, a collective, a cast, a constant, an index of the rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from proofs.shard_map_fuzz import letters as types
from proofs.shard_map_fuzz import pool
from proofs.shard_map_fuzz.builder import Builder
from proofs.shard_map_fuzz.program import Collective, Length, Letters, Local
from proofs.shard_map_fuzz.reference import blocks


def local(builder: Builder) -> bool:
    """A function of one value."""
    a = builder.pick()
    if a is None:
        return False
    linear = builder.is_linear_only(a)
    pools = [pool.LINEAR] if linear else [pool.LINEAR, pool.POINTWISE, pool.POINTWISE, pool.SHAPED]
    unary = builder.rng.choice(builder.rng.choice(pools))
    if builder.ndim(a) < unary.ndim:
        return False
    if "torch.cat" in unary.text and _is_skipped_by_cat(builder, a):
        return False
    target = builder.fresh()
    text = unary.text.format(a=a, **_dims(builder, a))
    return builder.add(Local(target, f"{target} = {text}", (a,)), [builder.letters[a]])


def _is_skipped_by_cat(builder: Builder, name: str) -> bool:
    """Whether a value is one of no elements and one dim on some rank: its gradient by torch.cat is no function."""
    return any(shape == (0,) for shape in builder.shapes(name))


def _dims(builder: Builder, name: str) -> dict[str, int]:
    """The dim `d` of a value that a template names."""
    return {"d": builder.rng.randrange(max(1, builder.ndim(name)))}


def binary(builder: Builder) -> bool:
    """A function of two values."""
    a = builder.pick()
    if a is None:
        return False
    kind = builder.rng.choice(["linear", "any", "any", "in place"])
    if builder.is_linear_only(a):
        kind = "linear"
    chosen = {"linear": (*pool.BILINEAR, *pool.ADDITIVE), "any": pool.BINARY, "in place": pool.IN_PLACE}[kind]
    template = builder.rng.choice(chosen)
    fits = [name for name in builder.floats() if not template.same or builder.shapes(name) == builder.shapes(a)]
    if builder.rng.random() < 0.4:  # values of different types, if there are any
        fits = [name for name in fits if builder.letters[name] != builder.letters[a]] or fits
    if template in pool.BILINEAR:
        fits = [name for name in fits if types.bilinear(builder.letters[a], builder.letters[name]) is not None]
    b = builder.pick(among=fits)
    if b is None or builder.ndim(a) < template.ndim or (builder.is_mapped and "_foreach" in template.text):
        return False
    if "torch.cat" in template.text and (_is_skipped_by_cat(builder, a) or _is_skipped_by_cat(builder, b)):
        return False
    held, other = builder.letters[a], builder.letters[b]
    if kind == "in place":
        found = held if _can_write(held, other) else None
    elif template in pool.BILINEAR:
        found = types.bilinear(held, other)
    elif template in pool.ADDITIVE:
        found = types.additive(held, other)
    else:
        found = types.joined([held, other])
    if found is None:
        return False
    target = builder.fresh()
    return builder.add(Local(target, f"{target} = {template.text.format(a=a, b=b)}", (a, b)), [found])


def _can_write(target: Letters, value: Letters) -> bool:
    pairs = [(kind, value[axis]) for axis, kind in target.items()]
    return all(
        "U" not in pair and (pair[0] == pair[1] or pair in (("V", "I"), ("R", "I"), ("V", "R"))) for pair in pairs
    )


def constant(builder: Builder) -> bool:
    """A tensor that depends on nothing."""
    target = builder.fresh()
    text = builder.rng.choice(pool.CONSTANTS).format(n=builder.rng.choice([1, 2, 3, 4]))
    return builder.add(Local(target, f"{target} = {text}", ()), [dict.fromkeys(builder.ranks.axes, "I")])


def index(builder: Builder) -> bool:
    """A function of a value and of the rank's index, or of the number of ranks."""
    a = builder.pick(lambda name: builder.ndim(name) > 0 and not builder.is_linear_only(name))
    if a is None:
        return False
    axes = builder.axes()
    number = builder.fresh()
    found = {axis: "V" if axis in axes else "I" for axis in builder.ranks.axes}
    if not builder.add(Collective(number, "axis_index", (), axes), [found]):
        return False
    target = builder.fresh()
    text = builder.rng.choice(pool.OF_INDEX).format(a=a, i=number, **_dims(builder, a))
    result = types.joined([builder.letters[a], found])
    return result is not None and builder.add(Local(target, f"{target} = {text}", (a, number)), [result])


CASTS = {"varying": "IRV", "reduced": "IR", "unreduced": "VU"}
"""The types that can be cast to each type, or have it."""

_NAMES = {
    "psum": 4, "pmean": 1, "pmax": 1, "pmin": 0.7, "all_gather": 4, "psum_scatter": 3, "all_to_all": 2.5,
    "ppermute": 2, "pcast": 3.5,
}  # fmt: skip


def collective(builder: Builder, name: str = "") -> bool:
    """A collective or a cast of one value along one axis or several."""
    rng = builder.rng
    name = name or rng.choices(list(_NAMES), list(_NAMES.values()))[0]
    axes = builder.axes()
    a = builder.pick()
    if a is None:
        return False
    options = _options(builder, name, a, axes)
    found = result_letters(name, options.get("to", ""), builder.letters[a], axes)
    if found is None:
        return False
    target = builder.fresh()
    return builder.add(Collective(target, name, (a,), axes, tuple(options.items())), [found])


def result_letters(name: str, to: str, held: Letters, axes: tuple[str, ...]) -> dict[str, str] | None:
    """The types of what a collective or a cast makes of a value; None if it takes no such value."""
    kinds = types.along(held, axes)
    others = {axis: kind for axis, kind in held.items() if axis not in axes}
    if name == "pcast":
        if not kinds <= set(CASTS[to]) or all(held[axis] == to[0].upper() for axis in axes):
            return None
        return types.changed(held, axes, to[0].upper())
    if name in ("psum", "pmean"):
        return None if "U" in kinds and len(kinds) > 1 else types.changed(held, axes, "I")
    if name in ("pmax", "pmin"):
        return None if "U" in kinds or types.has_unreduced(others) else types.changed(held, axes, "I")
    if name == "psum_scatter":
        return None if "U" in kinds and len(kinds) > 1 else types.changed(held, axes, "V")
    if "U" in kinds:
        return None
    return types.changed(held, axes, to[0].upper() if to else "V")


def _options(builder: Builder, name: str, a: str, axes: tuple[str, ...]) -> Mapping[str, Any]:
    rng, ndim = builder.rng, builder.ndim(a)
    tiled = ndim > 0 and rng.random() < 0.7
    if name == "pcast":
        held = types.along(builder.letters[a], axes)
        possible = [to for to, kinds in CASTS.items() if held <= set(kinds) and held != {to[0].upper()}]
        return {"to": rng.choice(possible or ["varying"])}
    if name == "all_gather":
        to = rng.choice(["varying", "varying", "invariant", "reduced"])
        return {"axis": rng.randrange(ndim + (not tiled)), "tiled": tiled, "to": to}
    count = builder.ranks.size(axes)
    if name == "psum_scatter":
        dim = _dim_of(builder, a, lambda size: size % count == 0 if tiled else size == count)
        return {"scatter_dimension": dim, "tiled": tiled}
    if name == "all_to_all":
        dim = _dim_of(builder, a, lambda size: size % count == 0 if tiled else size == count)
        return {"split_axis": dim, "concat_axis": rng.randrange(max(1, ndim)), "tiled": tiled}
    if name == "ppermute":
        sources, destinations = rng.sample(range(count), count), rng.sample(range(count), count)
        pairs = list(zip(sources, destinations, strict=True))
        return {"perm": pairs if rng.random() < 0.6 else pairs[: max(1, count - 1)]}
    return {}


def _dim_of(builder: Builder, name: str, fits: Any) -> int:
    """A dim whose length fits, if there is one; else any."""
    shape = builder.shape(name)
    found = [dim for dim, size in enumerate(shape) if fits(size)]
    return builder.rng.choice(found or list(range(max(1, len(shape)))))


def uneven_gather(builder: Builder) -> bool:
    """An all_gather of chunks that may be uneven, of which it takes the whole length."""
    rng, axes = builder.rng, builder.axes()
    a = builder.pick(lambda name: builder.ndim(name) > 0 and bool(builder.differing(name, axes)))
    a = a or builder.pick(lambda name: builder.ndim(name) > 0)
    if a is None:
        return False
    dim = rng.choice(builder.differing(a, axes) or range(builder.ndim(a)))
    to = rng.choice(["varying", "varying", "invariant", "reduced"])
    found = result_letters("all_gather", to, builder.letters[a], axes)
    if found is None:
        return False
    size = sum(builder.values[a][rank].shape[dim] for rank in builder.ranks.groups(axes)[0])
    options = (("axis", dim), ("tiled", True), ("to", to), ("size", size))
    target = builder.fresh()
    return builder.add(Collective(target, "all_gather", (a,), axes, options), [found])


def uneven_scatter(builder: Builder) -> bool:
    """A psum_scatter to chunks of the lengths that a dim of another value has."""
    rng, axes = builder.rng, builder.axes()
    a = builder.pick(lambda name: builder.ndim(name) > 0 and not builder.differing(name, axes))
    if a is None:
        return False
    found = result_letters("psum_scatter", "", builder.letters[a], axes)
    dim = rng.randrange(builder.ndim(a))
    fits = _dims_of_length(builder, _chunk_lengths(builder, a, dim, axes))
    if found is None or not fits:
        return False
    other, length = rng.choice(fits)
    options = (("scatter_dimension", dim), ("tiled", True), ("size", Length(length)))
    target = builder.fresh()
    return builder.add(Collective(target, "psum_scatter", (a,), axes, options, (other,)), [found])


def _chunk_lengths(builder: Builder, name: str, dim: int, axes: tuple[str, ...]) -> list[int]:
    """The length of each rank's chunk of a dim over some axes."""
    counts = [builder.ranks.size([axis]) for axis in axes]
    found = []
    for rank, x in enumerate(builder.values[name]):
        lines = blocks(torch.empty(x.shape[dim], device="meta"), 0, counts)
        found.append(len(lines[builder.ranks.index(rank, axes)]))
    return found


def _dims_of_length(builder: Builder, lengths: list[int]) -> list[tuple[str, int]]:
    """The values and their dims that have these lengths on the ranks."""
    return [
        (name, dim)
        for name in builder.floats()
        for dim in range(builder.ndim(name))
        if [x.shape[dim] for x in builder.values[name]] == lengths
    ]


def evened(builder: Builder) -> bool:
    """A value of which all ranks hold the same shape: padded by zeros, or summed, along a dim that differs."""
    rng = builder.rng
    a = builder.pick(lambda name: bool(builder.differing(name)))
    if a is None:
        return False
    dim = rng.choice(builder.differing(a))
    text = f"{a}.sum({dim})"
    if rng.random() < 0.5:
        length, last = max(shape[dim] for shape in builder.shapes(a)), builder.ndim(a) - 1
        pads = ", ".join(["0"] * (1 + 2 * (last - dim)))
        text = f"F.pad({a}, ({pads}, {length} - {a}.shape[{dim}]))"
    target = builder.fresh()
    return builder.add(Local(target, f"{target} = {text}", (a,)), [builder.letters[a]])


def narrowed(builder: Builder) -> bool:
    """A value that varies, narrowed to the lengths that a dim of another one has on the ranks."""
    rng = builder.rng
    b = builder.pick(lambda name: bool(builder.differing(name)))
    if b is None:
        return False
    other = rng.choice(builder.differing(b))
    lengths = [shape[other] for shape in builder.shapes(b)]
    along = [axis for axis in builder.ranks.axes if other in builder.differing(b, [axis])]

    def fits(name: str) -> list[int]:
        if any(builder.letters[name][axis] != "V" for axis in along):
            return []
        rows = list(zip(builder.shapes(name), lengths, strict=True))
        return [dim for dim in range(builder.ndim(name)) if all(length <= shape[dim] for shape, length in rows)]

    a = builder.pick(lambda name: name != b and bool(fits(name)))
    if a is None:
        return False
    dim, target = rng.choice(fits(a)), builder.fresh()
    text = f"{target} = {a}.narrow({dim}, 0, {b}.shape[{other}])"
    return builder.add(Local(target, text, (a,), (b,)), [builder.letters[a]])
