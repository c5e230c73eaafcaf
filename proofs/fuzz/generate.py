"""Generates the program of a seed."""

from __future__ import annotations

import functools
import itertools
import random
from contextlib import nullcontext

import attrs
import torch

from proofs.fuzz.draw import Draw, Operand
from proofs.fuzz.environment import Rejected, check_stable, seeded
from proofs.fuzz.maker import CHANCES, NAMES, TRIES, Maker, words
from proofs.fuzz.one_device import OneDevice
from proofs.fuzz.pool import LOOPS
from proofs.fuzz.program import AXES, MACHINES, Argument, Program
from proofs.fuzz.rounding import OtherRounding
from proofs.fuzz.tensors import NUDGE, Kind, Layout, Recipe, in_order, nudged
from proofs.fuzz.transforms import Kind as TransformKind
from proofs.fuzz.transforms import Transform
from spmd.core.placement import REDUCTIONS, supports_reduction
from spmd.core.spec import P

_TRANSFORMS = {
    TransformKind.NONE: 30,
    TransformKind.GRAD: 16,
    TransformKind.VJP: 10,
    TransformKind.JVP: 10,
    TransformKind.LINEARIZE: 6,
    TransformKind.VMAP: 11,
    TransformKind.ROW_GRAD: 3,
    TransformKind.JACREV: 4,
    TransformKind.JACFWD: 3,
    TransformKind.HESSIAN: 4,
    TransformKind.GRAD_GRAD: 5,
}
_COSTLY = frozenset({TransformKind.JACREV, TransformKind.JACFWD, TransformKind.HESSIAN, TransformKind.GRAD_GRAD})
_IN_TURN = 5  # operators of a program that are taken in turn and not drawn, so that none is rare
_REVERSE = frozenset(TransformKind) - {
    TransformKind.NONE, TransformKind.JVP, TransformKind.LINEARIZE, TransformKind.VMAP, TransformKind.JACFWD,
}  # fmt: skip
_LOOP_OF = 4  # programs, of which one holds a loop or a branch
_RETURNED = 0.25  # fraction of values with a later reader that are also returned, since the reader may hide an error
_RESULTS = 2048  # the most elements of all results together
_CALLS = 250  # the most operators that one device runs


def generate(seed: int) -> Program:
    """The program of a seed; it is deterministic."""
    attempts = (_generated(random.Random(f"{seed}.{attempt}"), seed) for attempt in itertools.count())
    return next(program for program in attempts if program is not None)


def _generated(rng: random.Random, seed: int) -> Program | None:
    """A program; None if rounding alone would change what it computes."""
    kind = rng.choices(list(_TRANSFORMS), list(_TRANSFORMS.values()))[0]
    length = _length(rng, kind)
    mesh = _mesh(rng, kind)
    axes = AXES[: len(mesh)]
    largest = 3 if kind in _COSTLY else 5
    draw = Draw(rng, axes=axes, mesh=mesh, largest=largest, most=min(8, 3 + length // 3), in_reverse=kind in _REVERSE)
    maker = Maker(draw)
    wanted = [*_in_turn(seed), *_loops_in_turn(seed, kind), *rng.choices(NAMES, CHANCES, k=length - _IN_TURN)]
    rng.shuffle(wanted)
    again = wanted[:]  # retried later, when there are other operands
    while len(maker.lines) - maker.adapted < length:
        operator = wanted.pop() if wanted else again.pop() if again else rng.choices(NAMES, CHANCES)[0]
        if any(maker.attempt(operator) for _ in range(TRIES)) and operator in again:
            again.remove(operator)
    return _finished(maker, seed, kind, mesh)


def _in_turn(seed: int) -> list[str]:
    """Operators that the program of a seed should have; over consecutive seeds, all operators are equally frequent."""
    turns = range(seed * _IN_TURN, (seed + 1) * _IN_TURN)
    return [_order(turn // len(NAMES))[turn % len(NAMES)] for turn in turns]


def _loops_in_turn(seed: int, kind: TransformKind) -> list[str]:
    """Loops and branches that a program should have: one program of `_LOOP_OF` has two."""
    turn, is_without = divmod(seed, _LOOP_OF)
    found = [name for name in LOOPS if name != "while_loop" or kind not in _REVERSE]
    return [] if is_without else [found[(turn + n) % len(found)] for n in (0, 3)]


@functools.cache
def _order(number: int) -> list[str]:
    """The operators in a random order, by its number."""
    return random.Random(number).sample(NAMES, len(NAMES))


def _length(rng: random.Random, kind: TransformKind) -> int:
    """The number of operators: 5 to 25, mostly few, and few under transforms that multiply operators."""
    if kind in _COSTLY:
        return rng.randint(5, 7)
    return 5 + min(20, int(rng.expovariate(0.16 if kind in (TransformKind.NONE, TransformKind.VMAP) else 0.28)))


def _finished(maker: Maker, seed: int, kind: TransformKind, mesh: tuple[int, ...]) -> Program | None:
    draw = maker.draw
    rng = draw.rng
    read = " ".join(line.text for line in maker.lines)
    used = set(words(read))
    arguments = {name: recipe for name, recipe in draw.arguments.items() if name in used}
    constants = tuple((name, recipe) for name, recipe in draw.constants.items() if name in used)
    returned = set(draw.unused)
    if kind not in _COSTLY:
        returned.update(name for name in draw.values if name not in draw.arguments and draw.maybe(_RETURNED))
    outputs = tuple(name for name in draw.values if name in returned)
    machine = rng.randrange(len(MACHINES))
    in_forward = any("spmd.while_loop" in line.text for line in maker.lines)
    for candidate in _candidates(kind):
        if in_forward and candidate in _REVERSE:
            continue
        recipes = dict(arguments)
        transform = _transform(rng, candidate, recipes)
        if transform is None:
            continue
        placed = tuple(Argument(name, recipe, _in_spec(draw, recipe)) for name, recipe in recipes.items())
        lines = tuple(maker.lines)
        program = Program(seed, mesh, machine, placed, constants, lines, outputs, transform, (), *_strided(draw))
        try:
            results = truth(program)
        except Rejected:
            continue
        return attrs.evolve(program, out_specs=tuple(_out_spec(draw, result) for result in results))
    return None


def _strided(draw: Draw) -> tuple[int, int]:
    """The number of values with more than one element, and how many of them are not contiguous."""
    environment = draw.environment
    tensors = [eval(recipe.text(), environment.values) for recipe in draw.arguments.values()]
    tensors += [environment.values[name] for name in draw.values if name not in draw.arguments]
    several = [tensor for tensor in tensors if tensor.numel() > 1]
    return len(several), sum(not tensor.is_contiguous() for tensor in several)


def _candidates(kind: TransformKind) -> list[TransformKind]:
    """The transform that was drawn, and its replacements if torch does not support the program under it."""
    order = [kind]
    if kind in _COSTLY or kind is TransformKind.ROW_GRAD:
        order += [TransformKind.GRAD]
    if kind is TransformKind.JVP:
        order += [TransformKind.VJP]
    return [*order, TransformKind.NONE]


def _transform(rng: random.Random, kind: TransformKind, recipes: dict[str, Recipe]) -> Transform | None:
    """The transform with its arguments; vmap adds a dim to the recipes of mapped arguments."""
    smooth = [n for n, recipe in enumerate(recipes.values()) if recipe.kind in (Kind.FLOAT, Kind.COMPLEX)]
    if kind in _COSTLY:
        smooth = [n for n in smooth if list(recipes.values())[n].kind is Kind.FLOAT]
        smooth = rng.sample(smooth, min(len(smooth), 2))
    transform = Transform(kind, tuple(sorted(smooth)))
    if transform.differentiates and not smooth:
        return None
    if kind in (TransformKind.JVP, TransformKind.LINEARIZE) and rng.random() < 0.3:
        transform = attrs.evolve(transform, argnums=tuple(sorted(rng.sample(smooth, rng.randint(1, len(smooth))))))
    if not transform.maps:
        return transform
    size = rng.randint(1, 4)
    dims: list[int | None] = [rng.randint(0, len(r.shape)) if rng.random() < 0.75 else None for r in recipes.values()]
    if not dims:
        return None
    if all(dim is None for dim in dims):
        dims[0] = 0
    for (name, recipe), dim in zip(list(recipes.items()), dims, strict=True):
        if dim is not None:
            shape = (*recipe.shape[:dim], size, *recipe.shape[dim:])
            recipes[name] = Recipe(recipe.kind, shape, seed=recipe.seed).relaid(rng)
    return attrs.evolve(transform, in_dims=tuple(dims), out_dim=0 if rng.random() < 0.7 else -1)


def truth(program: Program) -> list[torch.Tensor]:
    """The results of a program on one device.

    Raises:
        Rejected: torch refuses it, rounding would change it, or it has too many operators or result elements.
    """
    results: list[list[torch.Tensor]] = []
    try:
        space = program.compiled()
        given = [space[argument.name] for argument in program.arguments]
        moved = [nudged(value) for value in given]
        runs = ((given, nullcontext()), (moved, OtherRounding()), (moved, OtherRounding(-NUDGE)))
        for values, rounding in runs:
            with rounding, OneDevice() as device:
                results.append(list(seeded(space["reference"], *map(in_order, values))))
    except Exception as error:  # plain torch fails: there is nothing to compare with
        raise Rejected(f"{error}") from None
    if device.calls > _CALLS:
        raise Rejected("too many operators")
    for others in results[1:]:
        check_stable(results[0], others)
    if not results[0] or sum(result.numel() for result in results[0]) > _RESULTS:
        raise Rejected("too many results")
    return results[0]


def _mesh(rng: random.Random, kind: TransformKind) -> tuple[int, ...]:
    weights = (12, 7, 1) if kind in _COSTLY else (11, 7, 2)
    return rng.choice(rng.choices(_MESHES, weights)[0])


_MESHES = (
    ((1,), (2,), (2,), (3,), (3,), (4,), (4,), (5,)),
    ((2, 2), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 3), (2, 1)),
    ((2, 2, 2), (1, 2, 3), (2, 1, 2), (2, 3, 1)),
)
"""Mesh sizes: of one axis, of two, of three."""


def _in_spec(draw: Draw, recipe: Recipe) -> P:
    return _spec(draw, len(recipe.shape), getattr(torch, recipe.kind.value), 0.08)


def _out_spec(draw: Draw, result: torch.Tensor) -> P:
    return _spec(draw, result.ndim, result.dtype, 0.06) if draw.maybe(0.6) else P()


def _spec(draw: Draw, ndim: int, dtype: torch.dtype, pending: float) -> P:
    ops = [op for op in REDUCTIONS if supports_reduction(op, dtype)]
    return draw.spec(ndim, draw.choice(*ops) if ops else None, pending)


__all__ = ["Layout", "Operand", "generate", "truth"]
