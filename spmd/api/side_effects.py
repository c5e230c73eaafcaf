"""What a function under jit does to its surroundings while it is traced, which its program does not do: warnings."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from spmd.api.guards.access import Access, Line
from spmd.api.guards.checks import OfModule
from spmd.api.guards.kinds import MAPPINGS, ROWS, SETS, brief, is_plain, is_users_object
from spmd.api.hidden_state import HiddenState
from spmd.core.pytree import tree_leaves
from spmd.tracing.source import source_at

Attributes: TypeAlias = list[tuple[nn.Module, dict[str, Any]]]
"""Modules, each with a copy of its attributes."""


class SideEffectWarning(UserWarning):
    """A function under jit does what only its trace does: a program holds operators only."""


class HiddenStateWarning(UserWarning):
    """A function under jit reads what is too large to be compared at each call."""


class Surroundings:
    """What is around a function before it is traced, to be compared with what is there after.

    Args:
        hidden: what it reads beside its arguments.
        modules: the modules among its arguments.
        changed: the labels of what earlier traces have changed; what this one changes is added.
    """

    def __init__(self, hidden: HiddenState, modules: Iterable[nn.Module], changed: set[str]) -> None:
        self._hidden, self._reader, self._changed = hidden, hidden.reader, changed
        self._attributes = attributes_of([*modules, *hidden.modules])
        self._before = {id(access): access.value for access in self._accesses()}
        self._draws = self._generators()

    def _accesses(self) -> Iterable[Access]:
        return (access for root in self._reader.roots.values() for access in root.walk())

    def warn(self) -> None:
        """Warn of what the function has done, and of what it reads that is not compared."""
        for line, label in self._reader.unwatched.items():
            _warn(
                f"{label} is read at {_where(line)}, and is too large to be compared at each call: a change in it is "
                "not seen, and programs keep what it was. Pass it as an argument, or read what is needed before it.",
                HiddenStateWarning,
            )
        self._warn_of_attributes()
        for access in self._hidden.changed():
            self._warn_of_change(access)
        self._warn_of_traced_tensors()
        for label, line in self._reader.iterators:
            _warn(
                f"The iterator {label} at {_where(line)} gives its next item when the function is traced only: every "
                "call has the same. Take the item before the call, and pass it as an argument."
            )
        if self._reader.draws and self._generators() != self._draws:
            _warn(
                f"Random numbers of Python or NumPy are drawn at {_where(self._reader.draws[0][2])}, when the function "
                "is traced only: every call has the same. Draw by torch.rand, or pass the numbers as an argument."
            )

    def _warn_of_attributes(self) -> None:
        for owner, before in self._attributes:
            for name, now in list(vars(owner).items()):
                if now is not before.get(name):
                    label = f"{type(owner).__name__}.{name}"
                    self._tell(label, before.get(name), now, self._line_of(owner, name))

    def _line_of(self, owner: Any, name: str) -> Line:
        for access, step, line in self._reader.written:
            if access.value is owner and getattr(step, "name", None) == name:
                return line
        return next((line for _, step, line in self._reader.written if getattr(step, "name", None) == name), ("", 0))

    def _warn_of_change(self, access: Access) -> None:
        """Warn that the function has changed what it reads; of attributes of modules there are other warnings."""
        if OfModule in access.checks:
            return
        line = next((at for owner, step, at in self._reader.written if _is_write_to(access, owner, step)), access.line)
        before, now = self._before.get(id(access)), access.now()
        grows = all(check.holds(now) for check in access.checks.values())  # by what it did not have
        self._tell(access.label, None if grows else before, now, line)

    def _tell(self, label: str, before: Any, now: Any, line: Line) -> None:
        if _is_traced(now):
            _warn(f"{label} = ... at {_where(line)} keeps a traced tensor, which has no value. Return it.")
            return
        # What is made once, as a cache is, finds its program from then on: only a second change is one in each call.
        is_made = before is None or not (is_plain(now) or isinstance(now, (*ROWS, *SETS, *MAPPINGS)))
        if is_made and label not in self._changed:
            self._changed.add(label)
            return
        said = f"from {brief(before)} to {brief(now)}" if before is not now else "in place"
        _warn(
            f"{label} = ... at {_where(line)} changes what the function reads, {said}: a program does not do this, so "
            "each call is traced again. Pass it as an argument, and return the new value; or keep it in a buffer of a "
            "module."
        )

    def _warn_of_traced_tensors(self) -> None:
        for access, step, line in self._reader.written:
            value = access.value
            if isinstance(value, (*ROWS, *SETS, *MAPPINGS)):
                items = value.values() if isinstance(value, MAPPINGS) else value
                if any(map(_is_traced, items)):
                    put = f"A traced tensor, which has no value, was put into {access.label}"
                    _warn(f"{put} at {_where(line)}. Return it.")
            elif step is not None and _is_traced(_now(value, step)):
                label = step.label(access.label)
                _warn(f"{label} = ... at {_where(line)} keeps a traced tensor, which has no value. Return it.")

    def _generators(self) -> Any:
        """The states of Python's and NumPy's random generators."""
        numpy = sys.modules.get("numpy")
        states = [random.getstate(), None if numpy is None else repr(numpy.random.get_state())]
        for _, generator, _ in self._reader.draws:
            if generator is not None:
                states.append(generator.getstate() if isinstance(generator, random.Random) else _state(generator))
        return states


def attributes_of(modules: Iterable[nn.Module]) -> Attributes:
    """The submodules of the user's classes, each with a copy of its attributes."""
    owners = {id(owner): owner for module in modules for owner in module.modules() if is_users_object(owner)}
    return [(owner, dict(vars(owner))) for owner in owners.values()]


def _is_write_to(access: Access, owner: Access, step: Any) -> bool:
    return owner is access or (owner is access.parent and step in (None, access.step))


def _now(owner: Any, step: Any) -> Any:
    try:
        return step.of(owner)
    except Exception:
        return None


def _state(generator: Any) -> str:
    """The state of a generator of NumPy."""
    return repr(generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state)


def _warn(message: str, kind: type[Warning] = SideEffectWarning) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, kind, stacklevel=2)


_warned: set[str] = set()


def _where(line: Line) -> str:
    if not line[0]:
        return "an unknown line"
    source = source_at(*line)
    return f"{source} (`{source.code}`)" if source.code else str(source)


def _is_traced(value: Any) -> bool:
    return any(isinstance(leaf, (FakeTensor, FunctionalTensor)) for leaf in tree_leaves(value))  # of a key, its numbers
