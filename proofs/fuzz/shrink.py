"""Shrinks a failing program to a shorter one that fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from proofs.fuzz.environment import names
from proofs.fuzz.outcome import Outcome, Status
from proofs.fuzz.program import AXES, Argument, Program
from proofs.fuzz.tensors import Kind, Layout, Recipe
from proofs.fuzz.transforms import Kind as TransformKind
from proofs.fuzz.transforms import Transform
from spmd.core.spec import P

Check = Callable[[Program], "Outcome | None"]
"""From a program, its outcome; None if plain torch refuses it."""


def shrink(program: Program, check: Check, most: int = 600) -> Program:
    """A shorter program with the same kind of failure.

    Args:
        program: a program that fails.
        check: runs a program.
        most: the number of programs to try.
    """
    failure = check(program)
    if failure is None or failure.status is Status.RIGHT:
        return program
    tried: set[Program] = {program}
    progress = True
    while progress and most > 0:
        progress = False
        for step in _STEPS:
            candidates = step(program)
            while most > 0:
                candidate = next(candidates, None)
                if candidate is None:
                    break
                candidate = _pruned(candidate)
                if candidate in tried:
                    continue
                tried.add(candidate)
                most -= 1
                if _same(check(candidate), failure):
                    program, progress = candidate, True
                    candidates = step(program)
    return program


def _same(found: Outcome | None, failure: Outcome) -> bool:
    if found is None or found.status is not failure.status:
        return False
    if failure.status is Status.WRONG:  # other values, or another dtype, ...
        return found.kind.split()[:1] == failure.kind.split()[:1]
    return failure.status in (Status.COMMS, Status.HANG) or found.kind == failure.kind


def _pruned(program: Program) -> Program:
    """The program without arguments and constants that no line reads."""
    words = {word for line in program.lines for word in re.findall(r"[a-z]\d+", line.text)} | set(program.outputs)
    kept = tuple(n for n, argument in enumerate(program.arguments) if argument.name in words)
    constants = tuple((name, recipe) for name, recipe in program.constants if name in words)
    return _with_arguments(attrs.evolve(program, constants=constants), kept)


def _with_arguments(program: Program, kept: tuple[int, ...]) -> Program:
    transform = program.transform
    argnums = tuple(kept.index(n) for n in transform.argnums if n in kept)
    in_dims = tuple(transform.in_dims[n] for n in kept) if transform.in_dims else ()
    return attrs.evolve(
        program,
        arguments=tuple(program.arguments[n] for n in kept),
        transform=attrs.evolve(transform, argnums=argnums, in_dims=in_dims),
    )


def _transforms(program: Program) -> Iterator[Program]:
    kinds = (TransformKind.NONE, TransformKind.GRAD, TransformKind.VJP)
    for kind in kinds[: kinds.index(program.transform.kind) if program.transform.kind in kinds else None]:
        transform = Transform(kind, program.transform.argnums)
        yield attrs.evolve(program, transform=transform, out_specs=())
        if program.transform.maps:
            arguments = tuple(
                argument if dim is None else _placed(argument, _without(argument.recipe, dim))
                for argument, dim in zip(program.arguments, program.transform.in_dims, strict=True)
            )
            yield attrs.evolve(program, transform=transform, arguments=arguments, out_specs=())
    for n in range(len(program.transform.argnums) if len(program.transform.argnums) > 1 else 0):
        argnums = program.transform.argnums[:n] + program.transform.argnums[n + 1 :]
        yield attrs.evolve(program, transform=attrs.evolve(program.transform, argnums=argnums), out_specs=())


def _without(recipe: Recipe, dim: int) -> Recipe:
    return attrs.evolve(recipe, shape=recipe.shape[:dim] + recipe.shape[dim + 1 :], layout=Layout.CONTIGUOUS)


def _placed(argument: Argument, recipe: Recipe) -> Argument:
    """The argument with another tensor, and its spec cut to the tensor's dims."""
    return attrs.evolve(argument, recipe=recipe, spec=P(*argument.spec.dims[: len(recipe.shape)]))


def _outputs(program: Program) -> Iterator[Program]:
    if len(program.outputs) > 1:
        for name in program.outputs:
            yield attrs.evolve(program, outputs=(name,), out_specs=())
        for n in range(len(program.outputs)):
            outputs = program.outputs[:n] + program.outputs[n + 1 :]
            yield attrs.evolve(program, outputs=outputs, out_specs=program.out_specs[:n] + program.out_specs[n + 1 :])
    elif program.lines:
        for name in {**dict.fromkeys(re.findall(r"v\d+", program.lines[-1].text)), **_earlier(program)}:
            if name not in program.outputs:
                yield attrs.evolve(program, outputs=(name,), out_specs=())


def _earlier(program: Program) -> dict[str, None]:
    found = [re.match(r"v\d+", line.text) for line in program.lines[::-1]]
    return {match.group(): None for match in found if match}


def _lines(program: Program) -> Iterator[Program]:
    count = len(program.lines)
    for size in (count // 2, count // 4, 2, 1):
        if size:
            for start in range(count - size, -1, -1):
                yield attrs.evolve(program, lines=program.lines[:start] + program.lines[start + size :])


def _cuts(program: Program) -> Iterator[Program]:
    """Programs in which the values of one line are arguments instead."""
    values = _values(program)
    for n in range(len(program.lines) - 1, -1, -1):
        *functions, last = re.split(r"\n(?! )", program.lines[n].text)
        match = re.match(r"((?:v\d+(?:, )?|[(),_] ?)+)(?:, \*_)? = ", last)
        if match is None or not all(function.startswith("def ") for function in functions):
            continue
        found = [(name, values[name]) for name in re.findall(r"v\d+", match.group(1)) if name in values]
        made = [(name, Kind.of(value), tuple(value.shape)) for name, value in found]
        if any(kind is None for _, kind, _ in made):
            continue
        axes = AXES[: len(program.mesh)]
        for spec in ("replicated", "first", "last"):
            arguments = program.arguments
            transform = program.transform
            for name, kind, shape in made:
                place = (
                    P()
                    if spec == "replicated" or not shape
                    else P(*[None] * (len(shape) - 1 if spec == "last" else 0), axes)
                )
                arguments = (*arguments, Argument(name, Recipe(kind, shape, seed=n), place))  # type: ignore[arg-type]
                if kind in (Kind.FLOAT, Kind.COMPLEX) and transform.differentiates:
                    transform = attrs.evolve(transform, argnums=(*transform.argnums, len(arguments) - 1))
                if transform.maps:
                    transform = attrs.evolve(transform, in_dims=(*transform.in_dims, None))
            lines = program.lines[:n] + program.lines[n + 1 :]
            yield attrs.evolve(program, arguments=arguments, lines=lines, transform=transform)


def _values(program: Program) -> dict[str, Any]:
    """The values that the lines compute, for one example if the program runs under vmap."""
    space = names()
    try:
        exec("".join(argument.text(program.mesh) for argument in program.arguments), space)
        exec("".join(f"{name} = {recipe.text()}\n" for name, recipe in program.constants), space)
        for argument, dim in zip(program.arguments, program.transform.in_dims, strict=False):
            if dim is not None:
                space[argument.name] = space[argument.name].select(dim, 0)
        for line in program.lines:
            exec(line.text, space)
    except Exception:  # lines from a failing one on are not replaced
        pass
    return {name: value for name, value in space.items() if isinstance(value, torch.Tensor)}


def _specs(program: Program) -> Iterator[Program]:
    if any(spec != P() for spec in program.out_specs):
        yield attrs.evolve(program, out_specs=())
    for n, spec in enumerate(program.out_specs):
        if spec != P():
            yield attrs.evolve(program, out_specs=(*program.out_specs[:n], P(), *program.out_specs[n + 1 :]))
    for n, argument in enumerate(program.arguments):
        for spec in (P(), P(*argument.spec.dims)):
            if spec != argument.spec:
                changed = attrs.evolve(argument, spec=spec)
                yield attrs.evolve(program, arguments=(*program.arguments[:n], changed, *program.arguments[n + 1 :]))


def _meshes(program: Program) -> Iterator[Program]:
    for n in range(len(program.mesh)):
        if len(program.mesh) > 1:
            yield _without_axis(program, n)
        for size in range(1, program.mesh[n]):
            yield attrs.evolve(program, mesh=(*program.mesh[:n], size, *program.mesh[n + 1 :]))
    if program.machine:
        yield attrs.evolve(program, machine=0)


def _without_axis(program: Program, axis: int) -> Program:
    renamed = dict(zip([*AXES[:axis], *AXES[axis + 1 :]], AXES, strict=False))

    def moved(spec: P) -> P:
        dims = [tuple(renamed[name] for name in dim if name in renamed) for dim in spec.dims]
        return P(*dims, partial={renamed[name]: op for name, op in spec.partial if name in renamed})

    return attrs.evolve(
        program,
        mesh=program.mesh[:axis] + program.mesh[axis + 1 :],
        arguments=tuple(attrs.evolve(argument, spec=moved(argument.spec)) for argument in program.arguments),
        out_specs=tuple(moved(spec) for spec in program.out_specs),
    )


def _recipes(program: Program) -> Iterator[Program]:
    for n, argument in enumerate(program.arguments):
        for recipe in _simpler(argument.recipe):
            changed = attrs.evolve(argument, recipe=recipe)
            yield attrs.evolve(program, arguments=(*program.arguments[:n], changed, *program.arguments[n + 1 :]))
    for n, (name, recipe) in enumerate(program.constants):
        for simpler in _simpler(recipe):
            constants = (*program.constants[:n], (name, simpler), *program.constants[n + 1 :])
            yield attrs.evolve(program, constants=constants)


def _simpler(recipe: Recipe) -> Iterator[Recipe]:
    if recipe.layout is not Layout.CONTIGUOUS:
        yield attrs.evolve(recipe, layout=Layout.CONTIGUOUS)
    for dim, size in enumerate(recipe.shape):
        for smaller in sorted({1, 2, size - 1}):
            if 0 < smaller < size:
                yield attrs.evolve(recipe, shape=(*recipe.shape[:dim], smaller, *recipe.shape[dim + 1 :]))


def _texts(program: Program) -> Iterator[Program]:
    """Programs with one shorter line: without its last call or index, an elementwise call, an option or a number."""
    for n, line in enumerate(program.lines):
        for text in (*_shorter(line.text), *_shorter_bodies(line.text)):
            changed = attrs.evolve(line, text=text)
            yield attrs.evolve(program, lines=(*program.lines[:n], changed, *program.lines[n + 1 :]))


def _shorter(text: str) -> Iterator[str]:
    head, equals, expression = text.partition(" = ")
    if not equals or "\n" in text:
        return
    for match in re.finditer(r"\.\w+\([^()]*\)$|\.mT$|\.real$|\[[^\[\]]*\]$", expression):
        yield f"{head} = {expression[: match.start()]}"
    if expression.startswith("(") and expression.endswith(")"):
        yield f"{head} = {expression[1:-1]}"
    for pattern in (r" [+*/-] \d+(\.\d+)?", r", \w+=[^,()]+", r"\.(abs|square|tanh|sin|clone|contiguous)\(\)"):
        for match in re.finditer(pattern, expression):
            yield f"{head} = {expression[: match.start()]}{expression[match.end() :]}"


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _shorter_bodies(text: str) -> Iterator[str]:
    """Statements without a function or a line of one, or with a line that is shorter or one of its operands."""
    lines = text.split("\n") if "def " in text else []
    for n, line in enumerate(lines):
        depth = _depth(line)
        outside = (at for at in range(n + 1, len(lines)) if _depth(lines[at]) <= depth)
        yield "\n".join([*lines[:n], *lines[next(outside, len(lines)) :]])
        head, equals, expression = line.partition(" = ")
        operands = dict.fromkeys(re.findall(r"[a-z]\d+", expression)) if equals and depth else ()
        for changed in (*(f"{head} = {operand}" for operand in operands if operand != expression), *_shorter(line)):
            yield "\n".join([*lines[:n], changed, *lines[n + 1 :]])


_STEPS = (_transforms, _outputs, _lines, _cuts, _specs, _meshes, _recipes, _texts)
