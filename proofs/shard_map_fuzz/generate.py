"""Random programs: a function of global values with shard_map bodies, under transforms and nested."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch

from proofs.fuzz.program import default_dtype
from proofs.shard_map_fuzz import letters as types
from proofs.shard_map_fuzz import steps
from proofs.shard_map_fuzz.builder import Builder, weighted
from proofs.shard_map_fuzz.program import (
    Block,
    Collective,
    Kind,
    Layout,
    Letters,
    Local,
    Mode,
    Program,
    Region,
    Transform,
    argument_text,
    walk,
)  # fmt: skip
from proofs.shard_map_fuzz.prune import consumed_by, influences, pruned
from proofs.shard_map_fuzz.reference import Ranks, World

MESHES: tuple[tuple[tuple[str, int], ...], ...] = (
    (("x", 2),), (("x", 3),), (("x", 4),), (("x", 8),),
    (("x", 2), ("y", 2)), (("x", 2), ("y", 2)), (("x", 2), ("y", 3)), (("x", 4), ("y", 2)), (("x", 1), ("y", 3)),
    (("x", 2), ("y", 2), ("z", 2)),
)  # fmt: skip

EXCLUDED: frozenset[str] = frozenset({"uneven shards"})
"""Constructs that are not generated."""


@functools.lru_cache(maxsize=1024)
def generate(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    with default_dtype():
        while True:
            program = _attempt(rng, seed)
            if program is not None:
                return program


def _attempt(rng: random.Random, seed: int) -> Program | None:
    """A program, or None if it has no region whose results count, or no collective."""
    mode = weighted(rng, {Mode.JIT: 6, Mode.ALONE: 3, Mode.OUTSIDE: 1})
    mesh = rng.choice(MESHES)
    builder = Builder(rng, World(dict(mesh)), Ranks(), budget=rng.randint(8, 16))
    constants = _constants(builder)
    params, shapes = [], []
    for _ in range(rng.randint(1, 3)):
        shapes.append(_shape(rng, dict(mesh)))
        params.append(builder.fresh())
        builder.values[params[-1]] = [_evaluate(argument_text(shapes[-1], len(params) - 1))]
        builder.letters[params[-1]] = {}
    first = len(builder.steps)
    if mode is not Mode.JIT:  # a transform from outside cannot be told from one inside
        builder.copied = frozenset(step.target for step in constants)
    if mode is Mode.ALONE:
        if not region(builder, alone=params):
            return None
    else:
        _fill_outside(builder)
    made = builder.steps[first:]
    results = _results(builder, mode)
    if not results:
        return None
    layouts = _entered(builder, params) if mode is Mode.ALONE else [_layout(rng, shape, dict(mesh)) for shape in shapes]
    block = pruned(Block(tuple(params), tuple(made), results))
    if not any(isinstance(step, Collective) and step.name != "axis_index" for step in walk(block.steps)):
        return None
    return Program(seed, mode, mesh, constants, block, tuple(shapes), tuple(layouts))


def _evaluate(text: str) -> torch.Tensor:
    return eval(text, {"torch": torch})  # type: ignore[no-any-return]


def _constants(builder: Builder) -> tuple[Local, ...]:
    """Tensors that are made outside of the function, which closes over them."""
    for _ in range(builder.rng.randint(0, 2)):
        steps.constant(builder)
    return tuple(step for step in builder.steps if isinstance(step, Local))


def _shape(rng: random.Random, mesh: dict[str, int]) -> tuple[int, ...]:
    """A shape with some dims that mesh axes divide."""
    found = []
    for _ in range(weighted(rng, {0: 0.4, 1: 2, 2: 4, 3: 1})):
        size = rng.choice([1, 1, 2, 3])
        if rng.random() < 0.75:
            size *= rng.choice(list(mesh.values()))
        if rng.random() < 0.2:
            size *= rng.choice(list(mesh.values()))
        found.append(min(size, 16))
    return tuple(found)


def _layout(rng: random.Random, shape: Sequence[int], sizes: dict[str, int], share: float = 0.6) -> Layout:
    """A spec that shards dims evenly over some axes."""
    dims: list[tuple[str, ...]] = [() for _ in shape]
    left = list(shape)
    for axis in rng.sample(list(sizes), len(sizes)):
        fits = [dim for dim, size in enumerate(left) if size % sizes[axis] == 0]
        if fits and rng.random() < share:
            dim = rng.choice(fits)
            dims[dim] = (*dims[dim], axis)
            left[dim] //= sizes[axis]
    return Layout(tuple(dims))


def _entered(builder: Builder, params: Sequence[str]) -> list[Layout]:
    """The layouts of the arguments of the one region."""
    (step,) = (step for step in builder.steps if isinstance(step, Region))
    found = dict(zip(step.operands, step.in_layouts, strict=True))
    return [found[name] for name in params]


def _results(builder: Builder, mode: Mode) -> tuple[str, ...]:
    """Results of a region, or what was computed from them."""
    if mode is Mode.ALONE:
        return builder.steps[-1].targets
    made = {target for step in builder.steps for target in step.targets}
    late = [name for name in builder.floats() if name in made and name not in consumed_by(builder.steps)]
    return tuple(late[-4:])


def _fill_outside(builder: Builder) -> None:
    """Steps on global values: ordinary ones, regions, and transforms of both."""
    rng = builder.rng
    for _ in range(rng.randint(0, 2)):
        steps.local(builder)
    for _ in range(rng.choice([1, 1, 1, 2])):
        if rng.random() < 0.2:
            transform(builder)
        region(builder)
    for _ in range(rng.randint(0, 2)):
        rng.choice([steps.local, steps.binary])(builder)


_INSIDE = {
    steps.local: 4, steps.binary: 4, steps.collective: 6, steps.index: 1, steps.constant: 0.5,
}  # fmt: skip


def fill(builder: Builder) -> None:
    """Steps of a block, up to its budget."""
    tries = 0
    while builder.budget > 0 and tries < 60:
        tries += 1
        options: dict[Any, float] = dict(_INSIDE) if builder.ranks.axes else {steps.local: 4, steps.binary: 3}
        if builder.level < 4 and builder.budget >= 3:
            options[transform] = 1.6 if builder.ranks.axes else 0.5
            if builder.automatic():
                options[region] = 2.0 if builder.ranks.axes else 6.0
        before = len(builder.steps)
        if weighted(builder.rng, options)(builder):
            builder.budget -= len(builder.steps) - before


def region(builder: Builder, alone: Sequence[str] = ()) -> bool:
    """A shard_map'd block over some of the axes that are automatic here."""
    rng, automatic = builder.rng, builder.automatic()
    axes = automatic if rng.random() < 0.55 else rng.sample(automatic, rng.randint(1, len(automatic)))
    axes = [axis for axis in automatic if axis in axes]
    sizes = {axis: builder.world.mesh[axis] for axis in axes}
    operands = list(alone)
    if not alone:
        for _ in range(rng.randint(1, 3)):
            operands.append(builder.pick() or "")
    if not all(operands):
        return False
    operands = list(dict.fromkeys(operands))
    inner = builder.inner(max(3, builder.budget - 2), builder.ranks.inside(axes, list(sizes.values())))
    count = builder.world_size(axes)
    for name in alone:  # the function stands outside of the one that has these
        del inner.values[name], inner.letters[name]
    for name in inner.values:
        inner.values[name] = [x for x in inner.values[name] for _ in range(count)]
        inner.letters[name] = {**inner.letters[name], **dict.fromkeys(axes, "I")}
    layouts, params = [], []
    for name in operands:
        layout = _layout(rng, builder.shape(name), sizes, share=0.8)
        free = [axis for axis in axes if axis not in layout.axes]
        if free and not alone and rng.random() < 0.1:
            layout = Layout(layout.dims, (rng.choice(free),))
        layouts.append(layout)
        params.append(builder.fresh())
        inner.enter(params[-1], builder.values[name], builder.letters[name], layout)
    fill(inner)
    builder.budget -= len(inner.steps)
    check = rng.random() < 0.75
    results, out_layouts = _leave(inner, params, axes, check)
    targets = tuple(builder.fresh() for _ in results)
    block = Block(tuple(params), tuple(inner.steps), tuple(results))
    step = Region(targets, block, tuple(operands), tuple(axes), tuple(layouts), tuple(out_layouts), check)
    left = [{axis: inner.letters[name][axis] for axis in builder.ranks.axes} for name in results]
    return builder.add(step, left)


def _leave(inner: Builder, params: Sequence[str], axes: Sequence[str], check: bool) -> tuple[list[str], list[Layout]]:
    """Results of a region, brought to types that can leave it, and their layouts."""
    own = {target for step in inner.steps for target in step.targets}
    chosen: list[str] = []
    for _ in range(inner.rng.randint(1, 3)):
        name = inner.pick(lambda name: name not in chosen and name in own)
        chosen.append(name or inner.pick(among=params) or params[0])
    layouts, results = [], []
    for name in dict.fromkeys(chosen):
        result, layout = _settled(inner, name, axes, check)
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
                name = _through(inner, name, Collective("", "psum", (name,), (axis,)), axis, "I")
            continue
        if held == "I" and rng.random() < 0.85:
            continue
        if held == "V" and not check and rng.random() < 0.4 and not types.has_unreduced(inner.letters[name]):
            continue
        if inner.ndim(name) == 0 or (held == "V" and rng.random() < 0.25):
            if held != "I":
                name = _through(inner, name, Collective("", "psum", (name,), (axis,)), axis, "I")
            continue
        dims = dims or [() for _ in range(inner.ndim(name))]
        dim = rng.randrange(len(dims))
        dims[dim] = (*dims[dim], axis)
    return name, Layout(tuple(dims or ()), tuple(partial))


def _through(inner: Builder, name: str, step: Collective, axis: str, to: str) -> str:
    """What a collective makes of a value, whatever its size."""
    target = inner.fresh()
    made = Collective(target, step.name, step.operands, step.axes, step.options)
    inner.force(made, types.changed(inner.letters[name], [axis], to))
    return target


def transform(builder: Builder) -> bool:
    """A transform of `torch.func` of an inner block."""
    kind = builder.rng.choice(list(Kind))
    operands = [name for name in (builder.pick() for _ in range(builder.rng.randint(1, 2))) if name]
    operands = list(dict.fromkeys(operands))
    if not operands:
        return False
    operands = [_dense(builder, name) if name in builder.copied else name for name in operands]
    inner = builder.inner(builder.rng.randint(2, 4))
    inner.is_mapped |= kind is Kind.VMAP
    if kind is Kind.VMAP:
        return _vmap(builder, inner, operands)
    params = [builder.fresh() for _ in operands]
    for param, name in zip(params, operands, strict=True):
        inner.values[param], inner.letters[param] = inner.values[name], inner.letters[name]
    fill(inner)
    result = _result(inner, params)
    if result is None:
        return False
    make = {Kind.GRAD: _grad, Kind.VJP: _vjp, Kind.JVP: _jvp}[kind]
    return make(builder, inner, operands, params, result)


def _result(inner: Builder, params: Sequence[str]) -> str | None:
    """A result that depends on all parameters; torch has errors of its own, and zeros without types, for others."""
    own = [target for step in inner.steps for target in step.targets if target in inner.floats()]
    fits = [name for name in own if set(params) <= influences(_block(inner, params, name))]
    return inner.pick(among=fits)


def _block(inner: Builder, params: Sequence[str], result: str) -> Block:
    return Block(tuple(params), tuple(inner.steps), (result,))


def _shared(builder: Builder, operands: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(builder.letter_groups(name, "I") for name in operands)


def _cotangents(builder: Builder, operands: Sequence[str]) -> list[Letters]:
    return [{axis: types.COTANGENT[held] for axis, held in builder.letters[name].items()} for name in operands]


def _grad(builder: Builder, inner: Builder, operands: list[str], params: list[str], result: str) -> bool:
    """The gradient of a loss of any type but reduced."""
    if "R" in inner.letters[result].values():
        axes = inner.letter_groups(result, "R")
        result = _through_all(inner, result, axes)
    if inner.ndim(result) or builder.rng.random() < 0.5:
        target = inner.fresh()
        text = f"{result}.sum()" if inner.is_linear_only(result) else f"({result} * {result}).sum()"
        inner.force(Local(target, f"{target} = {text}", (result,)), inner.letters[result])
        result = target
    step = Transform(
        tuple(builder.fresh() for _ in operands),
        Kind.GRAD,
        _block(inner, params, result),
        tuple(operands),
        _shared(builder, operands),
        inner.letter_groups(result, "I"),
    )
    return builder.add(step, _cotangents(builder, operands))


def _through_all(inner: Builder, name: str, axes: tuple[str, ...]) -> str:
    target = inner.fresh()
    cast = Collective(target, "pcast", (name,), axes, (("to", "varying"),))
    inner.force(cast, types.changed(inner.letters[name], axes, "V"))
    return target


def _vjp(builder: Builder, inner: Builder, operands: list[str], params: list[str], result: str) -> bool:
    """A pull-back of a cotangent: of the right type already, or invariant where any is allowed."""
    held, shape = inner.letters[result], inner.shape(result)
    allowed = {"I": "I", "V": "VIR", "U": "RI", "R": "U"}

    def fits(name: str) -> bool:
        found = builder.letters[name]
        return builder.shape(name) == shape and all(found[axis] in allowed[kind] for axis, kind in held.items())

    cotangent = builder.pick(fits)
    if cotangent is None:
        if "R" in held.values():
            return False
        cotangent = builder.fresh()
        text = f"torch.linspace(-0.8, 1.0, {inner.sample(result).numel()}).reshape({shape})"
        made = builder.add(Local(cotangent, f"{cotangent} = {text}", ()), [dict.fromkeys(builder.ranks.axes, "I")])
        if not made:
            return False
    step = Transform(
        tuple(builder.fresh() for _ in operands),
        Kind.VJP,
        _block(inner, params, result),
        tuple(operands),
        _shared(builder, operands),
        inner.letter_groups(result, "I"),
        (cotangent,),
    )
    return builder.add(step, _cotangents(builder, operands))


def _jvp(builder: Builder, inner: Builder, operands: list[str], params: list[str], result: str) -> bool:
    """A push-forward of tangents that are functions of the operands, or invariant beside varying operands."""
    tangents = []
    operands = [_dense(builder, name) for name in operands]
    for name in operands:
        letters = builder.letters[name]
        target = builder.fresh()
        if builder.is_linear_only(name) or builder.rng.random() < 0.6:
            text = f"{name} * 0.7" if builder.is_linear_only(name) else f"torch.cos({name})"
            step = Local(target, f"{target} = {text}", (name,))
        else:
            text = f"torch.linspace(-0.8, 1.0, {builder.sample(name).numel()}).reshape({builder.shape(name)})"
            step, letters = Local(target, f"{target} = {text}", ()), dict.fromkeys(builder.ranks.axes, "I")
        if not builder.add(step, [letters]):
            return False
        tangents.append(target)
    block = _block(inner, params, result)
    made = Transform((builder.fresh(),), Kind.JVP, block, tuple(operands), extra=tuple(tangents))
    return builder.add(made, [inner.letters[result]])


def _dense(builder: Builder, name: str) -> str:
    """A copy of a value: torch has no tangent of one whose elements share a place in memory."""
    target = builder.fresh()
    builder.force(Local(target, f"{target} = {name} * 1.1", (name,)), builder.letters[name])
    return target


def _vmap(builder: Builder, inner: Builder, operands: list[str]) -> bool:
    """A vmap along a dim of each operand, or of some of them."""
    rng = builder.rng
    length = builder.shape(operands[0])[0] if builder.ndim(operands[0]) else 0
    params: list[str] = []
    in_dims: list[int | None] = []
    for name in operands:
        fits = [dim for dim, size in enumerate(builder.shape(name)) if size == length]
        dim = rng.choice(fits) if fits and (not params or rng.random() < 0.7) else None
        in_dims.append(dim)
        params.append(builder.fresh())
        inner.values[params[-1]] = [x if dim is None else x.select(dim, 0) for x in builder.values[name]]
        inner.letters[params[-1]] = builder.letters[name]
    if in_dims[0] is None:
        return False
    fill(inner)
    result = _result(inner, [param for param, dim in zip(params, in_dims, strict=True) if dim is not None])
    if result is None:
        return False
    out_dim = rng.randint(0, inner.ndim(result))
    step = Transform(
        (builder.fresh(),),
        Kind.VMAP,
        _block(inner, params, result),
        tuple(operands),
        in_dims=tuple(in_dims),
        out_dim=out_dim,
    )
    return builder.add(step, [inner.letters[result]])
