"""Runs one program on virtual ranks and by the reference, and compares values, first and second gradients."""

from __future__ import annotations

import linecache
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from proofs.fuzz.check import difference, failed
from proofs.fuzz.outcome import Outcome, Status
from proofs.fuzz.program import default_dtype
from proofs.shard_map_fuzz.generate import generate
from proofs.shard_map_fuzz.program import Collective, Kind, Mode, Program, Region, Transform, argument_text, walk
from proofs.shard_map_fuzz.reference import run_program
from spmd import distribute
from spmd.api.eager.dispatch import implicit_replication
from spmd.collectives.traffic import record_traffic
from spmd.testing.traffic import comms_differences

_TOLERANCE = 1e-9  # relative to the largest number of a result

HEADER = """\
import torch, spmd
import torch.nn.functional as F
from spmd import P, cond, make_mesh, scan, shard_map
from spmd.collectives import all_gather, all_to_all, axis_index, pcast, pmax, pmean, pmin, ppermute, psum, psum_scatter

torch.set_default_dtype(torch.float64)
"""

DERIVATIVES = """\
def weights(x):
    return torch.linspace(-0.6, 1.0, x.numel()).reshape(x.shape)
def results(*args):
    found = program(*args)
    return list(found) if isinstance(found, tuple) else [found]
def loss(*args):
    return sum((x * x * weights(x)).sum() + 0.3 * x.sum() for x in results(*args))
def first(*args):
    return torch.func.grad(loss, tuple(range(len(args))))(*args)
def slope(*args):
    return sum((g * weights(g)).sum() + 0.1 * (g * g).sum() for g in first(*args))
def second(*args):
    return torch.func.grad(slope, tuple(range(len(args))))(*args)
def everything(*args):
    return [*results(*args), *first(*args), *second(*args)]
"""
"""The derivatives of a program, as source that follows its definition."""


def script(program: Program) -> str:
    """A program that runs by itself, and prints values, first and second gradients."""
    text = HEADER + program.definitions() + DERIVATIVES
    if program.mode is Mode.JIT:
        text += f"print(spmd.jit(everything, {program.specs()}, None, mesh=mesh)(*arguments))\n"
        return text
    text += f"specs = {program.specs()}\n"
    if program.mode is Mode.OUTSIDE:
        text += "program = spmd.jit(program, specs, None, mesh=mesh)\n"
    text += "print(program(*arguments))\n"
    text += "arguments = [spmd.distribute(x, spec, mesh) for x, spec in zip(arguments, specs)]\n"
    return text + "with spmd.implicit_replication():\n    print(first(*arguments), second(*arguments))\n"


def namespace(program: Program) -> dict[str, Any]:
    """The names that the source of a program defines."""
    text = HEADER.replace("torch.set_default_dtype(torch.float64)\n", "") + program.definitions() + DERIVATIVES
    name = f"<shard_map program {program.seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {}
    exec(compile(text, name, "exec"), space)
    space["specs"] = eval(program.specs(), space)
    return space


def expected_of(program: Program, arguments: Sequence[Tensor]) -> list[Tensor]:
    """Values, first and second gradients by the reference."""
    leaves = [x.clone().requires_grad_() for x in arguments]
    results = run_program(program, leaves)
    loss = sum((x * x * _weights(x)).sum() + 0.3 * x.sum() for x in results)
    first = _gradients(loss, leaves)
    slope = sum((g * _weights(g)).sum() + 0.1 * (g * g).sum() for g in first)
    return [x.detach() for x in (*results, *first, *_gradients(slope, leaves))]


def _weights(x: Tensor) -> Tensor:
    return torch.linspace(-0.6, 1.0, x.numel()).reshape(x.shape)


def _gradients(loss: Any, leaves: Sequence[Tensor]) -> list[Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    return list(torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True))


def check_seed(
    seed: int,
    generated: Callable[[], None] = lambda: None,
    avoid: frozenset[str] = frozenset(),
    program: Program | None = None,
    run: Callable[[Program], Outcome] | None = None,
) -> Outcome:
    """Generate the program of a seed and check it; arguments as in `proofs.fuzz.check.check_seed`.

    What `avoid` has are modes, and what `described` lists.
    """
    start = time.process_time()
    with default_dtype(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = program or generate(seed)
        made = time.process_time()
        generated()
        found = avoid & {program.mode.value, *(described(program).operators if avoid else ())}
        outcome = Outcome(seed, Status.SKIPPED, f"with {min(found)}") if found else (run or check)(program)
    return attrs.evolve(outcome, seconds=time.process_time() - start, generating=made - start)


def check(program: Program) -> Outcome:
    """Check a program; the default dtype must be float64."""
    space = namespace(program)
    outcome = described(program)
    expected = expected_of(program, space["arguments"])
    if any(not torch.isfinite(x).all() or x.abs().max() > 1e6 for x in expected if x.numel()):
        return attrs.evolve(outcome, status=Status.SKIPPED, kind="gradients are too large")
    try:
        return _compared(program, space, outcome, expected)
    except Exception as error:
        return failed(outcome, error)


def _compared(program: Program, space: Mapping[str, Any], outcome: Outcome, expected: Sequence[Tensor]) -> Outcome:
    spmd, arguments = space["spmd"], space["arguments"]
    if program.mode is Mode.JIT:
        jitted = spmd.jit(space["everything"], space["specs"], None, mesh=space["mesh"])
    elif program.mode is Mode.OUTSIDE:
        jitted = spmd.jit(space["program"], space["specs"], None, mesh=space["mesh"])
        space["program"] = jitted  # type: ignore[index]
    else:
        jitted = space["program"].jitted
    with record_traffic() as traffic:
        found = jitted(*arguments)
    plan = jitted.plan(*arguments)
    differences = comms_differences(plan, traffic)
    actual = list(found) if isinstance(found, (tuple, list)) else [found]
    if program.mode is not Mode.JIT:
        placed = [distribute(x, spec, space["mesh"]) for x, spec in zip(arguments, space["specs"], strict=True)]
        with implicit_replication():
            actual += [*space["first"](*placed), *space["second"](*placed)]
    outcome = attrs.evolve(outcome, collectives=len(traffic.transfers))
    for index, (result, truth) in enumerate(zip(actual, expected, strict=True)):
        reason = difference(result, truth, tolerance=_TOLERANCE)
        if reason:
            what = _place(index, len(program.block.results), len(arguments))
            return attrs.evolve(outcome, status=Status.WRONG, kind=what.split(" of ")[0], message=f"{what}: {reason}")
    if differences:
        return attrs.evolve(outcome, status=Status.COMMS, kind="comms", message="; ".join(differences))
    return outcome


def _place(index: int, results: int, arguments: int) -> str:
    if index < results:
        return f"value of result {index}"
    order, argument = divmod(index - results, arguments)
    return f"{('first', 'second')[order]} gradient of argument {argument}"


def described(program: Program) -> Outcome:
    """What a program is made of, as an outcome that is right."""
    steps = list(walk(program.block.steps))
    regions = [step for step in steps if isinstance(step, Region)]
    made = {_named(step) for step in steps if isinstance(step, (Collective, Transform))}
    names = {axis for axis, _ in program.mesh}
    if any(len(step.axes) < len(names) for step in regions):
        made.add("partly automatic")
    if any(isinstance(inner, Region) for step in regions for inner in walk(step.block.steps)):
        made.add("nested")
    if any(not step.check for step in regions):
        made.add("check=False")
    made |= _shards(program)
    ranks = 1
    for _, size in program.mesh:
        ranks *= size
    return Outcome(program.seed, Status.RIGHT, transform=program.mode.value, operators=tuple(sorted(made)), ranks=ranks)


def _shards(program: Program) -> set[str]:
    """Whether shards that enter a region are uneven, and whether some are empty."""
    found: set[str] = set()

    def entered(shards: Sequence[Tensor]) -> None:
        found.update({"uneven"} if len({x.shape for x in shards}) > 1 else ())
        found.update({"empty"} if any(not x.numel() for x in shards) else ())

    shapes = enumerate(program.shapes)
    run_program(program, [eval(argument_text(shape, index), {"torch": torch}) for index, shape in shapes], entered)
    return found


def _named(step: Collective | Transform) -> str:
    if isinstance(step, Transform):
        return step.kind.value if step.kind in (Kind.SCAN, Kind.COND) else f"{step.kind.value} inside"
    to = dict(step.options).get("to")
    return step.name if to is None else f"{step.name} to {to}"
