"""Programs without the steps that nothing consumes."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from proofs.shard_map_fuzz.program import Block, Collective, Kind, Local, Region, Step, Transform


def pruned(block: Block) -> Block:
    """The steps of a block that its results depend on."""
    needed = set(block.results)
    kept: list[Step] = []
    for step in reversed(block.steps):
        if needed.isdisjoint(step.targets):
            continue
        if isinstance(step, (Region, Transform)):
            step = attrs.evolve(step, block=pruned(step.block))
        kept.append(step)
        needed.update(reads(step))
    return attrs.evolve(block, steps=tuple(reversed(kept)))


def reads(step: Step) -> set[str]:
    """The values from around a step that it reads, those that its block closes over too."""
    found = set(step.operands)
    if isinstance(step, (Local, Collective)):
        found.update(step.sizes)
    if isinstance(step, Transform):
        found.update(step.extra)
    if isinstance(step, (Region, Transform)):
        found |= _closed(step.block)
    return found


def _closed(block: Block) -> set[str]:
    own: set[str] = set(block.params)
    found: set[str] = set()
    for step in block.steps:
        found |= reads(step) - own
        own.update(step.targets)
    return found | (set(block.results) - own)


def consumed_by(steps: Iterable[Step]) -> set[str]:
    """All values that some steps read."""
    return set().union(*map(reads, steps))


def influences(block: Block) -> set[str]:
    """All values, parameters among them, on which the results of a block depend; not those of which shapes are read."""
    needed = set(block.results)
    for step in reversed(block.steps):
        if not needed.isdisjoint(step.targets):
            needed |= _influences_of(step, needed)
    return needed


def _influences_of(step: Step, needed: set[str]) -> set[str]:
    if not isinstance(step, (Region, Transform)):
        return set(step.operands)
    block = step.block
    if isinstance(step, Region):
        pairs = zip(step.targets, block.results, strict=True)
        block = attrs.evolve(block, results=tuple(result for target, result in pairs if target in needed))
    inner = influences(block)
    operands = zip(step.block.params, step.operands, strict=True)
    found = (inner - set(step.block.params)) | {operand for param, operand in operands if param in inner}
    decides = isinstance(step, Transform) and step.kind is Kind.COND  # which has no derivative
    return found | set(step.extra) if isinstance(step, Transform) and not decides else found
