"""One random step of a block: local torch code, a collective, a cast, a constant, an index of the rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proofs.shard_map_fuzz import letters as types
from proofs.shard_map_fuzz import pool
from proofs.shard_map_fuzz.builder import Builder
from proofs.shard_map_fuzz.program import Collective, Letters, Local


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
    target = builder.fresh()
    text = unary.text.format(a=a, **_dims(builder, a))
    return builder.add(Local(target, f"{target} = {text}", (a,)), [builder.letters[a]])


def _dims(builder: Builder, name: str) -> dict[str, int]:
    """The dim `d` of a value that a template names, and its length `n`."""
    shape = builder.shape(name)
    dim = builder.rng.randrange(len(shape)) if shape else 0
    return {"d": dim, "n": shape[dim] if shape else 1}


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
    fits = [name for name in builder.floats() if not template.same or builder.shape(name) == builder.shape(a)]
    if builder.rng.random() < 0.4:  # values of different types, if there are any
        fits = [name for name in fits if builder.letters[name] != builder.letters[a]] or fits
    if template in pool.BILINEAR:
        fits = [name for name in fits if types.bilinear(builder.letters[a], builder.letters[name]) is not None]
    b = builder.pick(among=fits)
    if b is None or builder.ndim(a) < template.ndim or (builder.is_mapped and "_foreach" in template.text):
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
