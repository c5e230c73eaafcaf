"""The stack and the variables of a call whose bytecode is followed."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import CodeType
from typing import Any, TypeAlias

from spmd.api.guards.access import Access, Line
from spmd.api.guards.instructions import Instruction
from spmd.api.guards.kinds import is_own_code
from spmd.api.guards.things import NULL, UNKNOWN, Values, union

Reader: TypeAlias = Any
"""The reader, which makes frames."""


class StackFrame(abc.ABC):
    """One call of a function.

    Args:
        reader: what follows names, attributes, items and calls.
        code: its code.
        local: what its parameters are.
        cells: what the variables that it closes over are, by name.
        names: the namespace of its globals.
        line: the line of the call, where the code is not the user's own.
    """

    def __init__(
        self,
        reader: Reader,
        code: CodeType,
        local: Mapping[str, Values],
        cells: Mapping[str, Any],
        names: Access,
        line: Line,
    ) -> None:
        self.reader, self.code, self.cells, self.globals = reader, code, dict(cells), names
        self._called_at = line
        self._is_own = is_own_code(code.co_filename)
        self.stack: list[Values] = []
        self.local: dict[str, Values] = dict(local)
        self.own_cells = {name: local.get(name, ()) for name in code.co_cellvars}
        self.result: Values = ()
        self._stored: dict[str, Values] = dict(local)  # all that a variable was
        self._line = code.co_firstlineno
        self._pending: dict[int, tuple[list[Values], dict[str, Values]]] = {}
        self._grown = False
        self._keywords: tuple[str, ...] = ()

    @property
    def line(self) -> Line:
        """The user's line that is being read."""
        return (self.code.co_filename, self._line) if self._is_own else self._called_at

    def _enter(self, state: tuple[list[Values], dict[str, Values]], alive: bool) -> None:
        stack, local = state
        if not alive:
            self.stack, self.local = list(stack), dict(local)
            return
        if len(stack) == len(self.stack):
            self.stack = [union(*each) for each in zip(stack, self.stack, strict=True)]
        for name, values in local.items():
            self.local[name] = union(values, self.local.get(name, ()))

    def _jump(self, target: int | None, stack: list[Values] | None = None) -> None:
        """Let the instruction at the target begin with what is known here, too."""
        stack = self.stack if stack is None else stack
        found = self._pending.get(target)  # type: ignore[arg-type]
        if found is None:
            self._pending[target] = list(stack), dict(self.local)  # type: ignore[index]
            self._grown = True
            return
        old_stack, old_local = found
        if len(old_stack) == len(stack):
            joined = [union(*each) for each in zip(old_stack, stack, strict=True)]
        else:
            joined = old_stack
        local = {n: union(old_local.get(n, ()), self.local.get(n, ())) for n in {*old_local, *self.local}}
        if joined != old_stack or local != old_local:
            self._grown = True
            self._pending[target] = joined, local  # type: ignore[index]

    def _pop(self) -> Values:
        return self.stack.pop() if self.stack else UNKNOWN

    def _pop_many(self, count: int) -> list[Values]:
        return [self._pop() for _ in range(count)][::-1]

    def _push(self, values: Values) -> None:
        self.stack.append(values)

    @abc.abstractmethod
    def _local(self, name: str) -> Values:
        """The possible value of a variable."""

    @abc.abstractmethod
    def _generic(self, each: Instruction) -> None:
        """An instruction whose operands are read whole, and of whose results nothing is known."""

    def _nop(self, each: Instruction) -> None:
        return

    _resume = _cache = _make_cell = _copy_free_vars = _gen_start = _extended_arg = _not_taken = _nop
    _setup_annotations = _pop_block = _nop

    def _pop_top(self, each: Instruction) -> None:
        for _ in range(-each.effect):
            self._pop()

    _pop_except = _pop_iter = _end_for = _pop_top

    def _push_null(self, each: Instruction) -> None:
        self._push(NULL)

    def _push_exc_info(self, each: Instruction) -> None:
        self.stack += [UNKNOWN]

    def _copy(self, each: Instruction) -> None:
        self._push(self.stack[-each.arg] if each.arg <= len(self.stack) else UNKNOWN)

    def _swap(self, each: Instruction) -> None:
        if each.arg <= len(self.stack):
            self.stack[-1], self.stack[-each.arg] = self.stack[-each.arg], self.stack[-1]

    def _dup_top(self, each: Instruction) -> None:
        self._push(self.stack[-1] if self.stack else UNKNOWN)

    def _dup_top_two(self, each: Instruction) -> None:
        self.stack += self.stack[-2:]

    def _rot(self, count: int) -> None:
        if len(self.stack) >= count:
            self.stack.insert(len(self.stack) - count, self.stack.pop())

    def _rot_two(self, each: Instruction) -> None:
        self._rot(2)

    def _rot_three(self, each: Instruction) -> None:
        self._rot(3)

    def _rot_four(self, each: Instruction) -> None:
        self._rot(4)

    def _rot_n(self, each: Instruction) -> None:
        self._rot(each.arg)
