"""Hidden state: globals, closure variables, defaults, and what is reached from them.

A program has what it read when it was traced. So that it is not used after a change, the chains of names, attributes
and items that the function's bytecode loads are followed, through the functions that it calls, and compared at each
call. What no chain names (computed keys, what code in C gets) is compared by content, up to a limit, above which a
warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from spmd.api.guards.access import Access, Line, compiled
from spmd.api.guards.bytecode_reader import BytecodeReader, TooMuch
from spmd.api.guards.checks import Check, OfModule, OfTensor, Unwritten
from spmd.api.guards.kinds import brief, is_plain
from spmd.api.guards.limits import TESTS
from spmd.api.guards.things import UNKNOWN, Values


class HiddenState:
    """The state that a function reads beside its arguments, as of its trace.

    Args:
        function: the function.
        module: the module that it is or of which it is a method: its state is an argument.
        arguments: for each argument by position, the module or the static object that it is; else None.

    Attributes:
        reader: what was found in the bytecode, until the function is traced.
    """

    def __init__(self, function: Any, module: nn.Module | None, arguments: Sequence[Any] = ()) -> None:
        self.reader = BytecodeReader()
        self._test: Callable[[], bool] | None = None
        self._tests = 0
        line: Line = ("", 0)
        args = [self._argument(value, line) for value in arguments]
        try:
            self._read(function, module, args, line)
        except TooMuch as error:
            self.reader.unwatched.setdefault(error.line, "the rest of what the function reads")
        self._roots = [access for access in self.reader.roots.values() if access.is_checked]
        self._pins_modules = any(isinstance(check, OfModule) for _, check in self._checks())

    def _argument(self, value: Any, line: Line) -> Values:
        if is_plain(value):
            return UNKNOWN
        is_module = isinstance(value, nn.Module)  # whose structure is a part of the signature
        return (self.reader.root(value, type(value).__name__, line, watched=not is_module, covered=is_module),)

    def _read(self, function: Any, module: nn.Module | None, args: list[Values], line: Line) -> None:
        reader = self.reader
        if module is None:
            reader.call((reader.root(function, getattr(function, "__name__", ""), line),), args, {}, line)
            return
        owner = reader.root(module, type(module).__name__, line, watched=False, covered=True)
        if isinstance(function, MethodType):
            reader.call(reader.attribute((owner,), function.__func__.__name__, line), args, {}, line)
        reader.call((owner,), args, {}, line)

    def _checks(self) -> Iterable[tuple[Access, Check]]:
        return ((a, check) for root in self._roots for a in root.walk() for check in a.checks.values())

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the function closes over."""
        return [access.value for access, check in self._checks() if isinstance(check, OfModule)]

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notice writes to tensors that the function was found to read when it was traced."""
        known = {id(x) for _, check in self._checks() if isinstance(check, (OfTensor, OfModule)) for x in check.tensors}
        rest = [x for x in tensors if id(x) not in known and not x.is_inference()]
        if rest:
            access = Access(None, None, None, "a closed-over tensor", ("", 0))
            access.add(Unwritten, rest)
            self._roots.append(access)
        for root in self.reader.roots.values():
            for each in root.walk():
                each.value = None  # the checks hold what they need
        self.reader = BytecodeReader()

    def unchanged(self) -> bool:
        """Compare all by identity; `matches` finds what is equal."""
        return self._test is not None and self._test()

    def matches(self) -> bool:
        """Compare all by content."""
        if self._test is not None and self._test():
            return True
        if self.failing() is not None:
            return False
        if self._test is None or self._tests < TESTS:
            self.prepare()
        return True

    def prepare(self) -> None:
        """Make the test of `unchanged` for what is there now."""
        self._test = compiled(self._roots)
        self._tests += 1

    def release(self) -> None:
        """Let go of what only the test holds: modules, which have no weak test that is fast."""
        if self._pins_modules:
            self._test = None

    def failing(self) -> Access | None:
        """The first access that is not what it was."""
        for root in self._roots:
            found = root.failing(root.now())
            if found is not None:
                return found
        return None

    @property
    def is_dead(self) -> bool:
        """True if it can never match again: an object is gone, or was written to."""
        return any(check.is_dead for _, check in self._checks())

    def changed(self) -> list[Access]:
        """The accesses that are not what they were, which the function itself has changed if it was just traced."""
        found = []
        for root in self._roots:
            for access in root.walk():
                try:
                    now = access.now()
                except Exception:
                    continue
                if not all(check.holds(now) for check in access.checks.values()) or access.gained(now):
                    found.append(access)
        return found

    @staticmethod
    def difference(access: Access) -> str:
        """Describe what a failing access is and was."""
        try:
            now = access.now()
        except Exception:
            return f"{access.label} is not there any more"
        was = next((check.text() for check in access.checks.values() if not check.holds(now)), "without it")
        if isinstance(now, torch.Tensor) or not is_plain(now):
            return f"{access.label} is another, or has changed" if was == "another" else f"{access.label} was {was}"
        return f"{access.label} is {brief(now)}, and was {was}"
