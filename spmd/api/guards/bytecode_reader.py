"""Follows what bytecode names, and decides how each value that is read is compared."""

from __future__ import annotations

import sys
from typing import Any

from spmd.api.guards.access import Access, Attribute, Item, Line, Step
from spmd.api.guards.attributes import Attributes
from spmd.api.guards.calls import Calls
from spmd.api.guards.items import Items
from spmd.api.guards.kinds import (
    LOOKUPS,
    is_plain,
)
from spmd.api.guards.limits import INSTRUCTIONS
from spmd.api.guards.things import (
    UNKNOWN,
    Fixed,
    Made,
    Values,
    constant,
    union,
)
from spmd.api.guards.whole_reads import WholeReads


class BytecodeReader(Attributes, Items, WholeReads, Calls):
    """Follows one function: names and writes; the rest is in the parts."""

    def count(self, line: Line) -> None:
        """Count an instruction.

        Raises:
            TooMuch: there were too many.
        """
        self._steps += 1
        if self._steps > INSTRUCTIONS:
            raise TooMuch(line)

    def name(self, names: Access, name: str, line: Line) -> Values:
        """A global, or a name of Python's own."""
        if name in names.value:
            value = names.value[name]
            return (names.child(Item(name), value, line, watched=names.watched or isinstance(value, LOOKUPS)),)
        builtins = names.value.get("__builtins__", {})
        own = builtins if isinstance(builtins, dict) else vars(builtins)
        if name in own:
            value = own[name]
            return constant(value) if is_plain(value) else (Fixed(value),)
        return UNKNOWN

    def constant(self, value: Any) -> Values:
        """A constant of the code."""
        if id(value) not in self._constants:
            self._constants[id(value)] = constant(value)
        return self._constants[id(value)]

    def cell(self, cell: Any, line: Line) -> Values:
        """A variable of an enclosing function."""
        if isinstance(cell, tuple):
            frame, name = cell
            return union(frame.own_cells[name], frame.local.get(name, ()))
        return () if cell is None else (cell,)

    def imported(self, name: str) -> Values:
        """A module that the function imports."""
        module = sys.modules.get(name.partition(".")[0] if "." in name else name)
        return UNKNOWN if module is None else (self.root(module, name, ("", 0), watched=False),)

    def made(self, function: Made) -> Made:
        """The one function of such code and variables."""
        cells = ((id(c[0]), c[1]) if isinstance(c, tuple) else id(c) for c in function.cells.values())
        key = function.code, function.defaults, function.keyword_defaults, *cells
        return self._made.setdefault(key, function)

    def writes(self, thing: Any, kind: str, name: Any, line: Line) -> None:
        """A write to an attribute or an item, or to any item where the name is not known."""
        if isinstance(thing, Access):
            step: Step | None = None
            if name is not None:
                step = Attribute(name) if kind == "attribute" else Item(name)
            self.written.append((thing, step, line))

    def writes_cell(self, cell: Any, line: Line) -> None:
        """A write to a variable of an enclosing function."""
        if isinstance(cell, Access) and cell.parent is not None:
            self.written.append((cell.parent, cell.step, line))


class TooMuch(Exception):
    """A function is too long to be followed to its end."""

    def __init__(self, line: Line) -> None:
        super().__init__(line)
        self.line = line
