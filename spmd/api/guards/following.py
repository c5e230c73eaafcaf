"""The state that the parts of the reader share, and their interface."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from spmd.api.guards.access import Access, Line, Step
from spmd.api.guards.things import Made, Parts, Values


class Following(abc.ABC):
    """Follows one function.

    Attributes:
        roots: the accesses of what stays what it is: the function, namespaces, classes.
        written: what the code writes to, with the line: an access, and the step to what is written if it is known.
        unwatched: what is read but not compared, with the line.
        iterators: iterators of which the code takes an item.
        draws: generators of random numbers of Python and NumPy from which it draws.
    """

    def __init__(self) -> None:
        self.roots: dict[int, Access] = {}
        self.written: list[tuple[Access, Step | None, Line]] = []
        self.unwatched: dict[Line, str] = {}
        self.iterators: list[tuple[str, Line]] = []
        self.draws: list[tuple[str, Any, Line]] = []
        self._running: dict[Any, Values] = {}
        self._made: dict[Any, Made] = {}
        self._rows: dict[Any, Values] = {}
        self._constants: dict[int, Values] = {}
        self._whole: set[int] = set()
        self._modules: set[int] = set()
        self._steps = self._items = self._depth = 0

    def root(self, value: Any, label: str, line: Line, *, watched: bool = True, covered: bool = False) -> Access:
        """The access of an object that stays what it is."""
        found = self.roots.get(id(value))
        if found is None:
            found = self.roots[id(value)] = Access(None, None, value, label, line, watched=watched, covered=covered)
        return found

    def row(
        self, items: Sequence[Values], names: tuple[Any, ...] | None = None, *, exact: bool = True, site: Any = None
    ) -> Values:
        """A row or a mapping that the code makes: one for equal items, so that equal calls are followed once.

        Args:
            items, names, exact: as in `Parts`.
            site: where it is made, for what the code may change.
        """
        key = site, tuple(items), names, exact
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = (Parts(tuple(items), names, exact),)
        return found

    @abc.abstractmethod
    def attribute(self, values: Values, name: str, line: Line) -> Values:
        """An attribute."""

    @abc.abstractmethod
    def member_of(self, kind: type, name: str, access: Access, line: Line, after: Any = None) -> Values:
        """A member of a class or of its bases, for an instance or the class."""

    @abc.abstractmethod
    def inner(self, access: Access, name: str, value: Any, line: Line) -> Access:
        """A submodule, which its parent's comparison covers."""

    @abc.abstractmethod
    def cell(self, cell: Any, line: Line) -> Values:
        """A variable of an enclosing function."""

    @abc.abstractmethod
    def item(self, owner: Values, key: Values, line: Line) -> Values:
        """An item by its key."""

    @abc.abstractmethod
    def items_of(self, access: Access, line: Line) -> Values:
        """The items of a container, each by its place or key."""

    @abc.abstractmethod
    def iterated(self, values: Values, line: Line) -> Values:
        """The result of iteration: any of the items."""

    @abc.abstractmethod
    def items_for_extension(self, values: Values) -> tuple[Values, ...]:
        """The items that `[*values]` adds."""

    @abc.abstractmethod
    def by_identity(self, thing: Any) -> None:
        """Compare an object by what it is."""

    @abc.abstractmethod
    def whole(self, values: Values, line: Line) -> None:
        """Compare all that a value is: code that is not followed has it."""

    @abc.abstractmethod
    def content(self, access: Access, line: Line) -> None:
        """Read one access as a whole."""

    @abc.abstractmethod
    def call(self, callee: Values, args: Sequence[Values], named: dict[str, Values], line: Line) -> Values:
        """The result of a call."""

    @abc.abstractmethod
    def call_of_module(self, access: Access, args: list[Values], named: dict[str, Values], line: Line) -> Values:
        """A call of a module: its hooks, and the `forward`s of all of its own classes."""

    @abc.abstractmethod
    def run_unknown(self, made: Made, line: Line) -> None:
        """A call of a function that the code makes, with anything."""
