"""A mutant: this package with one defect, patched in while a context is active."""

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
"""From the original attribute, its replacement."""


@attrs.frozen(eq=False)
class Patch:
    """One attribute of a module, a class, a rule or a primitive, and its change."""

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
    """A defect that the fuzzer must find.

    Args:
        name: the name of the mutant.
        breaks: what is broken, in one sentence without a period.
        patches: the changes.
        within: operators of the pool or of plans, or kinds of collectives: only programs with one of them can show the
            defect. If empty, all programs can.
    """

    name: str
    breaks: str
    patches: tuple[Patch, ...]
    within: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the package is broken; the package's caches are cleared on entry and exit."""
        with contextlib.ExitStack() as stack:
            for patch in self.patches:
                stack.enter_context(patch.applied())
            clear_caches()
            try:
                yield
            finally:
                clear_caches()

    def concerns(self, outcome: Outcome) -> bool:
        """Whether a program can show the defect, given its outcome in the unbroken package; it must be right there."""
        if outcome.status is not Status.RIGHT:
            return False
        return not self.within or not self.within.isdisjoint((*outcome.operators, *outcome.planned))


def clear_caches() -> None:
    """Clear the caches of this package's functions."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # what is frozen is not among the objects
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper and str(found.__module__).startswith("spmd."):
            found.cache_clear()
    if frozen:
        gc.freeze()


def mutant(name: str, breaks: str, *patches: Patch, within: str = "") -> Mutant:
    """A mutant; `within` is a text of words."""
    return Mutant(name, breaks, patches, frozenset(within.split()))


def replaced(owner: Any, name: str, value: Any) -> Patch:
    """A patch that replaces an attribute by `value`."""
    return Patch(owner, name, lambda before: value)


def with_entry(owner: Any, name: str, key: Any, value: Any) -> Patch:
    """A patch of a mapping that replaces the value of one key."""
    return Patch(owner, name, lambda before: {**before, key: value})


def returning(owner: Any, name: str, change: Change) -> Patch:
    """A patch of a function that applies `change` to its result."""
    return Patch(owner, name, lambda function: lambda *args, **kwargs: change(function(*args, **kwargs)))


def of_rule(name: str, breaks: str, ops: str, change: Callable[[Call, Factors], Factors], within: str = "") -> Mutant:
    """A mutant of the factors that rules return.

    Args:
        name, breaks: as in `Mutant`.
        ops: the operators whose rules are broken, as `"mm bmm sum.dim_IntList"`.
        change: from a call and its factors, the wrong factors.
        within: as in `mutant`; by default, `ops`.
    """

    def changed(factorize: Callable[[Call], Factors]) -> Callable[[Call], Factors]:
        return lambda call: change(call, factorize(call)) if call.op in found else factorize(call)

    found = [operator(op) for op in ops.split()]
    rules: Mapping[int, Rule | None] = {id(rule): rule for rule in map(find_rule, found)}
    patches = (Patch(rule, "factorize", changed) for rule in rules.values())
    return mutant(name, breaks, *patches, within=within or " ".join(map(str, found)))
