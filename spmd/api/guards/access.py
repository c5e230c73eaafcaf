"""Accesses: the chains of names, attributes and items by which a function reaches what it reads, with their checks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import attrs

from spmd.api.guards.checks import Check, Refer
from spmd.core.generated import define

Line: TypeAlias = tuple[str, int]
"""A file and a line in it."""


@attrs.frozen
class Attribute:
    """An attribute of an object, of a class or of a module."""

    name: str

    def of(self, owner: Any) -> Any:
        return getattr(owner, self.name)

    def code(self, owner: str, refer: Refer) -> str:
        return f"{owner}.{self.name}" if self.name.isidentifier() else f"getattr({owner}, {self.name!r})"

    def label(self, owner: str) -> str:
        if self.name.startswith("__"):  # of a method, a default, a wrapped function
            return "self" if self.name == "__self__" else owner
        return f"{owner}.{self.name}" if owner else self.name


@attrs.frozen
class Item:
    """An item of a container, or a name in a namespace."""

    key: Any

    def of(self, owner: Any) -> Any:
        return owner[self.key]

    def code(self, owner: str, refer: Refer) -> str:
        return f"{owner}[{refer(self.key)}]"

    def label(self, owner: str) -> str:
        return f"{owner}[{self.key!r}]" if owner else str(self.key)


@attrs.frozen
class ClassMember:
    """A member of a class itself, as it stands in the class."""

    name: str

    def of(self, owner: Any) -> Any:
        return owner.__dict__[self.name]

    def code(self, owner: str, refer: Refer) -> str:
        return f"{owner}.__dict__[{self.name!r}]"

    def label(self, owner: str) -> str:
        return f"{owner}.{self.name}"


@attrs.frozen
class Closure:
    """A variable of an enclosing function."""

    number: int
    name: str

    def of(self, owner: Any) -> Any:
        return owner.__closure__[self.number].cell_contents

    def code(self, owner: str, refer: Refer) -> str:
        return f"{owner}.__closure__[{self.number}].cell_contents"

    def label(self, owner: str) -> str:
        return self.name


class Unset:
    """What a variable of the context without a value has."""


@attrs.frozen
class ContextValue:
    """The value of a `contextvars.ContextVar`, `Unset` without one: its default stays what it is."""

    def of(self, owner: Any) -> Any:
        return owner.get(Unset)

    def code(self, owner: str, refer: Refer) -> str:
        return f"{owner}.get({refer(Unset)})"

    def label(self, owner: str) -> str:
        return f"{owner}.get()"


Step: TypeAlias = Attribute | Item | ClassMember | Closure | ContextValue


class Access:
    """A value, and how it is reached.

    Args:
        parent: that of which it is an attribute or an item; None for a root, which stays what it is.
        step: how it is reached from there.
        value: the value, until the function is traced.
        label: its name in messages.
        line: where it is read.
        watched: whether it may change.
        covered: whether its attributes are compared in another way, as those of a module.
    """

    def __init__(
        self,
        parent: Access | None,
        step: Step | None,
        value: Any,
        label: str,
        line: Line,
        *,
        watched: bool = True,
        covered: bool = False,
    ) -> None:
        self.parent, self.step, self.value, self.label, self.line = parent, step, value, label, line
        self.watched, self.covered = watched, covered
        self.children: dict[Step, Access] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.checks: dict[type[Check], Check] = {}
        self.absent: set[Step] = set()
        self._root = _root(value) if parent is None else None

    def child(self, step: Step, value: Any, line: Line, *, watched: bool = True) -> Access:
        """The access of an attribute or an item, made at the first use."""
        found = self.children.get(step)
        if found is None:
            label = step.label(self.label)
            found = Access(self, step, value, label, line, watched=watched and not self.covered, covered=self.covered)
            self.children[step] = found
        return found

    def add(self, check: type[Check], *args: Any) -> Check:
        """Compare it in some way, too."""
        if check not in self.checks:
            self.checks[check] = check(*args)
        return self.checks[check]

    def expect(self, check: type[Check]) -> None:
        """Compare its value in some way, if it may change."""
        if self.is_compared and check not in self.checks:
            self.checks[check] = check(self.value)  # type: ignore[call-arg]

    @property
    def is_compared(self) -> bool:
        """True if it is compared itself, and not as a part of something else."""
        return self.watched and not self.covered

    def walk(self) -> Iterator[Access]:
        """It, and all that is reached from it."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def now(self) -> Any:
        """The current value.

        Raises:
            Exception: nothing is.
        """
        if self.parent is None:
            return self._root()  # type: ignore[misc]
        assert self.step is not None
        return self.step.of(self.parent.now())

    def failing(self, value: Any) -> Access | None:
        """The first access from here that is not what it was, if this one has a value; the others are refreshed."""
        for check in self.checks.values():
            if not check.holds(value):
                return self
            check.refresh(value)
        if self.gained(value):
            return self
        for child in self.children.values():
            if not child.is_checked:
                continue
            try:
                now = child.step.of(value)  # type: ignore[union-attr]
            except _GONE:
                return child
            found = child.failing(now)
            if found is not None:
                return found
        return None

    def gained(self, value: Any) -> bool:
        """Test whether a value has gained what it did not have."""
        return any(_has(step, value) for step in self.absent)

    @property
    def is_checked(self) -> bool:
        """True if it or anything reached from it is compared."""
        return bool(self.checks or self.absent) or any(child.is_checked for child in self.children.values())

    def tests(self, name: str, refer: Refer, fresh: Callable[[], str]) -> Iterator[str]:
        """Conditions of generated code, in order, for a variable that has the value."""
        for check in self.checks.values():
            yield check.test(name, refer)
        for step in self.absent:
            yield f"not {refer(_has)}({refer(step)}, {name})"
        for child in self.children.values():
            if child.is_checked:
                yield from child.tests_of(child.step.code(name, refer), refer, fresh)  # type: ignore[union-attr]

    def tests_of(self, code: str, refer: Refer, fresh: Callable[[], str]) -> Iterator[str]:
        """Conditions of generated code, for an expression that gives the value."""
        if len(self.checks) == 1 and not self.absent and not any(c.is_checked for c in self.children.values()):
            (check,) = self.checks.values()
            test = check.test("\0", refer)
            if test.count("\0") == 1:
                yield test.replace("\0", code)
                return
        name = fresh()
        yield f"(({name} := {code}),)"
        yield from self.tests(name, refer, fresh)

    @property
    def root(self) -> Any:
        """The object of a root; None if it is gone."""
        return self._root() if self._root else None


_GONE = (KeyError, ValueError, AttributeError, IndexError, TypeError)
"""The errors of an access to something that is gone."""


def _has(step: Step, owner: Any) -> bool:
    if isinstance(step, Attribute):
        return hasattr(owner, step.name)
    try:
        return step.key in owner if isinstance(step, Item) else step.of(owner) is not None
    except _GONE:
        return False


def _root(value: Any) -> Callable[[], Any]:
    """A class weakly; all else as long as the function lives."""
    return weakref.ref(value) if isinstance(value, type) else lambda: value


def compiled(roots: list[Access]) -> Callable[[], bool]:
    """A function that says whether nothing has changed, generated for speed."""
    space: dict[str, Any] = {}
    names: dict[int, str] = {}

    def refer(target: Any) -> str:
        name = names.get(id(target))
        if name is None:
            name = names[id(target)] = f"g{len(space)}"
            space[name] = target
        return name

    def fresh() -> str:
        fresh.count += 1  # type: ignore[attr-defined]
        return f"v{fresh.count}"  # type: ignore[attr-defined]

    fresh.count = 0  # type: ignore[attr-defined]
    lines = ["def unchanged():", "    try:"]
    for access in roots:
        if access.is_checked:
            tests = list(access.tests(refer(access.root), refer, fresh))
            lines += [
                f"        if not ({' and '.join(tests[n : n + 20])}): return False" for n in range(0, len(tests), 20)
            ]
    lines += ["        return True", "    except Exception:", "        return False"]
    return define("unchanged", lines, space, "<spmd guards>")
