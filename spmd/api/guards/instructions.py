"""The bytecode of functions, with the differences of Python's versions taken out where they are easy to take out."""

from __future__ import annotations

import dis
import functools
import sys
from types import CodeType
from typing import Any

import attrs


@attrs.frozen
class Instruction:
    """One instruction.

    Args:
        name: its name.
        arg: its number.
        value: what its number stands for.
        offset: where it is.
        next: where that which follows it is.
        target: where it jumps to, if it does.
        line: the line of the source.
        effect: by how much it changes the height of the stack.
    """

    name: str
    arg: int
    value: Any
    offset: int
    next: int
    target: int | None
    line: int
    effect: int


@functools.lru_cache(maxsize=4096)
def instructions_of(code: CodeType) -> tuple[Instruction, ...]:
    """The instructions of a code object."""
    line, found = code.co_firstlineno, []
    every = list(dis.get_instructions(code))
    for number, each in enumerate(every):
        line = getattr(each, "line_number", None) or _starts(each) or line
        jumps = each.opcode in dis.hasjrel or each.opcode in dis.hasjabs
        after = every[number + 1].offset if number + 1 < len(every) else each.offset + 2
        effect = _effect(each.opcode, each.arg)
        target = each.argval if jumps else None
        found.append(Instruction(each.opname, each.arg or 0, each.argval, each.offset, after, target, line, effect))
    return tuple(found)


def _starts(instruction: Any) -> int | None:
    """The line that an instruction starts, before Python 3.13."""
    found = instruction.starts_line
    return found if found and not isinstance(found, bool) else None


def _effect(opcode: int, arg: int | None) -> int:
    try:
        return dis.stack_effect(opcode, arg if opcode >= dis.HAVE_ARGUMENT else None, jump=False)
    except ValueError:
        return 0


@functools.lru_cache(maxsize=4096)
def handlers_of(code: CodeType) -> dict[int, int]:
    """The height of the stack at each exception handler, from Python 3.11 on; before, SETUP_FINALLY jumps to it."""
    if sys.version_info < (3, 11):
        return {}
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return {entry.target: entry.depth + entry.lasti + 1 for entry in table}
