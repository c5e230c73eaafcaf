"""A mutant: this package with one thing broken, by patching, as long as a context lasts."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import attrs

from proofs.fuzz.outcome import Outcome, Status
from spmd.collectives.primitive import Primitive
from spmd.ir.call import Call
from spmd.rules import find_rule
from spmd.rules.rule import Factors, Rule, operator

Change: TypeAlias = Callable[[Any], Any]
"""From what is there to what stands in its place."""


@attrs.frozen(eq=False)
class Patch:
    """One attribute of a module, a class or a rule, and what to make of it."""

    owner: Any
    name: str
    change: Change

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the attribute is changed."""
        owner = importlib.import_module(self.owner) if isinstance(self.owner, str) else self.owner
        put = object.__setattr__ if isinstance(owner, (Rule, Primitive)) else setattr
        before = inspect.getattr_static(owner, self.name) if inspect.isclass(owner) else getattr(owner, self.name)
        put(owner, self.name, self.change(before))
        try:
            yield
        finally:
            put(owner, self.name, before)


@attrs.frozen(eq=False)
class Mutant:
    """A defect that the fuzz must find.

    Args:
        name: of the mutant.
        breaks: what is broken, in one sentence without its end.
        patches: what is changed.
        within: operators of the pool or of plans, or kinds of collectives: only programs with one of them can show the
            defect. All programs, if there are none.
    """

    name: str
    breaks: str
    patches: tuple[Patch, ...]
    within: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the package is broken; nothing that was computed outside is remembered in it."""
        with contextlib.ExitStack() as stack:
            for patch in self.patches:
                stack.enter_context(patch.applied())
            clear_caches()
            try:
                yield
            finally:
                clear_caches()

    def concerns(self, outcome: Outcome) -> bool:
        """Whether a program, which is right in the unbroken package, can show the defect."""
        if outcome.status is not Status.RIGHT:
            return False
        return not self.within or not self.within.isdisjoint((*outcome.operators, *outcome.planned))


def clear_caches() -> None:
    """Forget what functions of this package have computed."""
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper and str(found.__module__).startswith("spmd."):
            found.cache_clear()


def mutant(name: str, breaks: str, *patches: Patch, within: str = "") -> Mutant:
    """A mutant; `within` are words."""
    return Mutant(name, breaks, patches, frozenset(within.split()))


def replaced(owner: Any, name: str, value: Any) -> Patch:
    """A patch to a value that does not depend on what was there."""
    return Patch(owner, name, lambda before: value)


def with_entry(owner: Any, name: str, key: Any, value: Any) -> Patch:
    """A patch of a mapping that gives one key another value."""
    return Patch(owner, name, lambda before: {**before, key: value})


def returning(owner: Any, name: str, change: Change) -> Patch:
    """A patch of a function of which results are changed."""
    return Patch(owner, name, lambda function: lambda *args, **kwargs: change(function(*args, **kwargs)))


def of_rule(name: str, breaks: str, ops: str, change: Callable[[Call, Factors], Factors], within: str = "") -> Mutant:
    """A mutant of the factors that rules find.

    Args:
        name, breaks: as in `Mutant`.
        ops: the operators whose rules are broken, as `"mm bmm sum.dim_IntList"`.
        change: from a call and its factors to what the rule says instead.
        within: as in `mutant`; by default the operators.
    """

    def changed(factorize: Callable[[Call], Factors]) -> Callable[[Call], Factors]:
        return lambda call: change(call, factorize(call)) if call.op in found else factorize(call)

    found = [operator(op) for op in ops.split()]
    rules: Mapping[int, Rule | None] = {id(rule): rule for rule in map(find_rule, found)}
    patches = (Patch(rule, "factorize", changed) for rule in rules.values())
    return mutant(name, breaks, *patches, within=within or " ".join(map(str, found)))
