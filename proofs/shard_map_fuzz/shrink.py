"""Makes a program that fails as short as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs

from proofs.fuzz.outcome import Outcome
from proofs.shard_map_fuzz.check import check_seed
from proofs.shard_map_fuzz.program import Block, Collective, Local, Mode, Program, Region, Step, Transform, renamed
from proofs.shard_map_fuzz.prune import pruned


def shrink(program: Program, check: Callable[[Program], Outcome] | None = None) -> Program:
    """The shortest program found that fails in the same way: results and steps are left out, one at a time."""
    run = check or (lambda candidate: check_seed(candidate.seed, program=candidate))
    wanted = _sign(run(program))
    improved = True
    while improved:
        improved = False
        for candidate in _smaller(program):
            try:
                found = _sign(run(candidate))
            except Exception:  # a candidate that means nothing
                continue
            if found == wanted:
                program, improved = candidate, True
                break
    return program


def _sign(outcome: Outcome) -> tuple[str, str]:
    return outcome.status.value, outcome.kind if outcome.status.value != "wrong" else ""


def _smaller(program: Program) -> Iterator[Program]:
    for block in _smaller_blocks(program.block, top=program.mode is not Mode.ALONE):  # whose results are its region's
        if block.steps and any(isinstance(step, Region) for step in block.steps):
            yield attrs.evolve(program, block=pruned(block))


def _smaller_blocks(block: Block, top: bool = False) -> Iterator[Block]:
    if len(block.results) > 1 and top:
        for name in block.results:
            yield attrs.evolve(block, results=tuple(other for other in block.results if other != name))
    for place, step in enumerate(block.steps):
        if isinstance(step, (Local, Collective)) and step.operands:
            for operand in step.operands:
                yield _without(block, place, step.target, operand)
        elif isinstance(step, (Region, Transform)):
            for inner in _smaller_blocks(step.block):
                changed = attrs.evolve(step, block=inner)
                yield attrs.evolve(block, steps=(*block.steps[:place], changed, *block.steps[place + 1 :]))
        if isinstance(step, Region) and len(step.targets) > 1:
            for index in range(len(step.targets)):
                yield from _fewer(block, place, step, index)


def _fewer(block: Block, place: int, step: Region, index: int) -> Iterator[Block]:
    """A region with one result less, if that is not read."""
    leave = lambda items: tuple(item for other, item in enumerate(items) if other != index)  # noqa: E731
    inner = attrs.evolve(step.block, results=leave(step.block.results))
    changed = attrs.evolve(step, targets=leave(step.targets), out_layouts=leave(step.out_layouts), block=inner)
    results = tuple(name for name in block.results if name != step.targets[index])
    if results:
        steps = (*block.steps[:place], changed, *block.steps[place + 1 :])
        yield attrs.evolve(block, steps=steps, results=results)


def _without(block: Block, place: int, target: str, operand: str) -> Block:
    """A block without one step, whose operand is read in its place."""
    rest = [_renamed(step, target, operand) for step in block.steps[place + 1 :]]
    results = tuple(operand if name == target else name for name in block.results)
    return attrs.evolve(block, steps=(*block.steps[:place], *rest), results=results)


def _renamed(step: Step, old: str, new: str) -> Step:
    names = lambda found: tuple(new if name == old else name for name in found)  # noqa: E731
    if isinstance(step, Local):
        step = attrs.evolve(step, text=renamed(step.text, old, new))
    if isinstance(step, (Local, Collective)):
        return attrs.evolve(step, operands=names(step.operands), sizes=names(step.sizes))
    steps: Sequence[Step] = [_renamed(inner, old, new) for inner in step.block.steps]
    block = attrs.evolve(step.block, steps=tuple(steps), results=names(step.block.results))
    if isinstance(step, Transform):
        return attrs.evolve(step, block=block, operands=names(step.operands), extra=names(step.extra))
    return attrs.evolve(step, block=block, operands=names(step.operands))
