"""Random programs: a function of global values with shard_map bodies, under transforms and nested."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from proofs.fuzz.program import default_dtype
from proofs.shard_map_fuzz import letters as types
from proofs.shard_map_fuzz import steps
from proofs.shard_map_fuzz.builder import Builder, weighted
from proofs.shard_map_fuzz.layouts import random_layout, random_shape
from proofs.shard_map_fuzz.leaving import leaving
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
    Step,
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

_UNEVEN = 0.3
"""The share of programs whose regions may have uneven shards."""


@functools.lru_cache(maxsize=1024)
def generate(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    with default_dtype(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            program = _attempt(rng, seed)
            if program is not None:
                return program


def _attempt(rng: random.Random, seed: int) -> Program | None:
    """A program, or None if it has no region whose results count, or no collective."""
    mode = weighted(rng, {Mode.JIT: 6, Mode.ALONE: 3, Mode.OUTSIDE: 1})
    mesh = rng.choice(MESHES)
    uneven = rng.random() < _UNEVEN
    builder = Builder(rng, World(dict(mesh)), Ranks(), budget=rng.randint(8, 16), is_uneven=uneven)
    constants = _constants(builder)
    params, shapes = [], []
    for _ in range(rng.randint(1, 3)):
        shapes.append(random_shape(rng, dict(mesh), uneven))
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
    if mode is Mode.ALONE:
        layouts = _entered(builder, params)
    else:
        layouts = [random_layout(rng, shape, dict(mesh), uneven=uneven) for shape in shapes]
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

_UNEVEN_STEPS = {steps.uneven_gather: 1.5, steps.uneven_scatter: 1.5, steps.evened: 2, steps.narrowed: 1}
"""Steps beside these, where ranks may hold unequal shapes."""


def fill(builder: Builder) -> None:
    """Steps of a block, up to its budget."""
    tries = 0
    while builder.budget > 0 and tries < 60:
        tries += 1
        options: dict[Any, float] = dict(_INSIDE) if builder.ranks.axes else {steps.local: 4, steps.binary: 3}
        if builder.is_uneven and builder.ranks.axes:
            options |= _UNEVEN_STEPS
        if builder.level < 4 and builder.budget >= 3:
            options[transform] = 1.6 if builder.ranks.axes else 0.5
            options[repeated] = options[chosen] = 2.0 if builder.ranks.axes else 0.5
            if builder.automatic() and not (builder.is_uneven and builder.ranks.axes):
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
        layout = random_layout(rng, builder.shape(name), sizes, share=0.8, uneven=builder.is_uneven)
        free = [axis for axis in axes if axis not in layout.axes]
        if free and not alone and rng.random() < 0.1:
            layout = Layout(layout.dims, (rng.choice(free),))
        layouts.append(layout)
        params.append(builder.fresh())
        inner.enter(params[-1], builder.values[name], builder.letters[name], layout)
    fill(inner)
    builder.budget -= len(inner.steps)
    check = rng.random() < 0.75
    results, out_layouts = leaving(inner, params, axes, check)
    targets = tuple(builder.fresh() for _ in results)
    block = Block(tuple(params), tuple(inner.steps), tuple(results))
    step = Region(targets, block, tuple(operands), tuple(axes), tuple(layouts), tuple(out_layouts), check)
    left = [{axis: inner.letters[name][axis] for axis in builder.ranks.axes} for name in results]
    return builder.add(step, left)


def transform(builder: Builder) -> bool:
    """A transform of `torch.func` of an inner block."""
    kind = builder.rng.choice([Kind.GRAD, Kind.VJP, Kind.JVP, Kind.VMAP])
    operands = [name for name in (builder.pick() for _ in range(builder.rng.randint(1, 2))) if name]
    operands = list(dict.fromkeys(operands))
    if not operands:
        return False
    operands = [_dense(builder, name) if name in builder.copied else name for name in operands]
    if kind in (Kind.GRAD, Kind.VJP):
        operands = [_of_each_rank(builder, name) for name in operands]
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


def _body(builder: Builder) -> tuple[Builder, str, str] | None:
    """A block of one parameter, with the operand and the parameter."""
    operand = builder.pick(lambda name: builder.ndim(name) > 0)
    if operand is None:
        return None
    inner, param = builder.inner(builder.rng.randint(2, 4)), builder.fresh()
    inner.values[param], inner.letters[param] = builder.values[operand], builder.letters[operand]
    fill(inner)
    return inner, operand, param


def _of_kind(inner: Builder, param: str, like: Letters | None) -> str | None:
    """A result of a block with the shapes of its parameter, and its types where they must be equal."""
    own = [target for step in inner.steps for target in step.targets if target in inner.floats()]
    fits = [name for name in own if inner.shapes(name) == inner.shapes(param) and like in (None, inner.letters[name])]
    return inner.pick(among=[name for name in fits if param in influences(_block(inner, (param,), name))])


def _needs_all_ranks(step: Step) -> bool:
    """Whether a step sums over ranks, or may send: where ranks part, or items of a batch, it cannot stand."""
    if isinstance(step, Transform):
        return step.kind in (Kind.GRAD, Kind.VJP)
    return isinstance(step, Region) or (isinstance(step, Collective) and step.name not in ("axis_index", "pcast"))


def repeated(builder: Builder) -> bool:
    """A block that runs several times, each time on what it made before."""
    if (made := _body(builder)) is None:
        return False
    inner, operand, param = made
    result = _of_kind(inner, param, inner.letters[param])
    if result is None:
        return False
    trips = builder.rng.choice([1, 2, 2, 3])
    step = Transform((builder.fresh(),), Kind.SCAN, _block(inner, (param,), result), (operand,), trips=trips)
    return builder.add(step, [inner.letters[param]])


def chosen(builder: Builder) -> bool:
    """A block that runs if the sum of a value is above zero, which may differ between ranks."""
    decides = builder.pick(lambda name: not builder.is_linear_only(name))
    made = _body(builder) if decides is not None else None
    if decides is None or made is None or builder.is_linear_only(made[1]):
        return False
    inner, operand, param = made
    parts = builder.letter_groups(decides, "V")
    if (parts or builder.is_mapped) and any(map(_needs_all_ranks, walk(inner.steps))):
        return False
    result = _of_kind(inner, param, None)
    if result is None or inner.is_linear_only(result):
        return False
    found = types.joined([inner.letters[result], builder.letters[operand]])
    if found is None:
        return False
    step = Transform((builder.fresh(),), Kind.COND, _block(inner, (param,), result), (operand,), extra=(decides,))
    return builder.add(step, [types.changed(found, parts, "V")])


def _of_each_rank(builder: Builder, name: str) -> str:
    """A value that varies along the axes along which batches do: the gradient of an invariant one is an error there."""
    axes = tuple(axis for axis in builder.letter_groups(name, "I") if axis in builder.own_batches)
    return _through_all(builder, name, axes) if axes else name


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
        same = builder.shapes(name) == inner.shapes(result)
        return same and all(found[axis] in allowed[kind] for axis, kind in held.items())

    cotangent = builder.pick(fits)
    if cotangent is None:
        if "R" in held.values() or not inner.is_equal(result):
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
            text = f"torch.linspace(-0.8, 1.0, {name}.numel()).reshape({name}.shape)"
            step, letters = Local(target, f"{target} = {text}", (), (name,)), dict.fromkeys(builder.ranks.axes, "I")
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
    if length == 0:
        return False
    params: list[str] = []
    in_dims: list[int | None] = []
    for name in operands:
        fits = [dim for dim in range(builder.ndim(name)) if {shape[dim] for shape in builder.shapes(name)} == {length}]
        dim = rng.choice(fits) if fits and (not params or rng.random() < 0.7) else None
        in_dims.append(dim)
        params.append(builder.fresh())
        inner.values[params[-1]] = [x if dim is None else x.select(dim, 0) for x in builder.values[name]]
        inner.letters[params[-1]] = builder.letters[name]
        inner.own_batches |= frozenset(() if dim is None else builder.letter_groups(name, "V"))
    if in_dims[0] is None:
        return False
    fill(inner)
    result = _result(inner, [param for param, dim in zip(params, in_dims, strict=True) if dim is not None])
    if result is None:
        return False
    out_dim = rng.randint(0, inner.ndim(result))
    if any(isinstance(made, Transform) and made.kind is Kind.JVP for made in walk(inner.steps)):
        out_dim = 0  # the tangent may lack the batch dim: of a linear function, in a constant direction
    step = Transform(
        (builder.fresh(),),
        Kind.VMAP,
        _block(inner, params, result),
        tuple(operands),
        in_dims=tuple(in_dims),
        out_dim=out_dim,
    )
    return builder.add(step, [inner.letters[result]])
