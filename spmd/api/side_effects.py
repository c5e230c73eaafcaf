"""What a function under jit does to its surroundings while it is traced, which its program does not do: warnings."""

from __future__ import annotations

import dis
import random
import sys
import warnings
from collections.abc import Iterable
from types import CodeType
from typing import Any, TypeAlias

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from spmd.api.hidden_state import HiddenState
from spmd.api.places import Place, brief, is_users_object, items_of, nested, same
from spmd.tracing.source import source_at

_READS = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD", "LOAD_NAME", "IMPORT_NAME")
_WRITES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")

Attributes: TypeAlias = list[tuple[nn.Module, dict[str, Any]]]
"""Modules, each with a copy of its attributes."""


class SideEffectWarning(UserWarning):
    """A function under jit does what only its trace does: a program holds operators only."""


class Surroundings:
    """What is around a function before it is traced, to be compared with what is there after.

    Args:
        hidden: what it reads beside its arguments.
        modules: the modules among its arguments.
    """

    def __init__(self, hidden: HiddenState, modules: Iterable[nn.Module]) -> None:
        self._hidden = hidden
        self._attributes = attributes_of([*modules, *hidden.modules])
        self._draws = self._generators()

    def warn(self) -> None:
        """Warn of what the function has done."""
        for owner, before in self._attributes:
            for name, now in list(vars(owner).items()):
                if now is not before.get(name):
                    self._hidden.visit_methods(owner)  # to find the line
                    place = Place(f"{type(owner).__name__}.{name}", vars(owner), name, before.get(name))
                    self._warn_of_change(place, now)
        for place in self._hidden.places.values():
            if place.is_changed:
                self._warn_of_change(place, place.now)
        self._warn_of_containers()
        for label, held in self._hidden.objects:
            for name, value in list(held.items()):
                if _is_traced(value) and (id(held), name) not in self._hidden.places:
                    line = self._line(name, ("STORE_ATTR",))
                    _warn(f"{label}.{name} = ... at {line} keeps a traced tensor, which has no value. Return it.")
        for label in self._hidden.iterators:
            line = self._line(label.rpartition(".")[2], _READS)
            _warn(
                f"The iterator {label} at {line} gives its next item when the function is traced only: every call has "
                "the same. Take the item before the call, and pass it as an argument."
            )
        if self._generators() != self._draws:
            names = [label.rpartition(".")[2] for label, _ in self._hidden.generators] or ["random"]
            _warn(
                f"Random numbers of Python or NumPy are drawn at {self._line(names[0], _READS)}, when the function is "
                "traced only: every call has the same. Draw by torch.rand, or pass the numbers as an argument."
            )

    def _warn_of_containers(self) -> None:
        grown = set()
        for label, value, items in self._hidden.containers:
            found = items_of(value)
            if len(found) != len(items) or not all(map(same, found, items)):
                grown.add(id(value))
            if any(map(_is_traced, found)):
                name = label.partition("[")[0].rpartition(".")[2]
                _warn(
                    f"A traced tensor, which has no value, was put into {label} at {self._line(name, _READS)}. "
                    "Return it."
                )
        if grown:
            self._hidden.forget(grown)

    def _warn_of_change(self, place: Place, now: Any) -> None:
        line = self._line(place.name, _WRITES)
        if _is_traced(now):
            _warn(f"{place.label} = ... at {line} keeps a traced tensor, which has no value. Return it.")
        else:
            _warn(
                f"{place.label} = ... at {line} changes what the function reads, from {brief(place.value)} to "
                f"{brief(now)}: a program does not do this, so each call is traced anew. Pass it as an argument, and "
                "return the new value; or keep it in a buffer of a module."
            )

    def _generators(self) -> Any:
        """The states of Python's and NumPy's random generators."""
        numpy = sys.modules.get("numpy")
        states = [random.getstate(), None if numpy is None else repr(numpy.random.get_state())]
        for _, generator in self._hidden.generators:
            states.append(generator.getstate() if isinstance(generator, random.Random) else _state(generator))
        return states

    def _line(self, name: str, operations: tuple[str, ...]) -> str:
        """The line of the first instruction of the functions with such a name."""
        for code in self._hidden.codes:
            line = code.co_firstlineno
            for instruction in (i for each in nested(code) for i in dis.get_instructions(each)):
                line = getattr(instruction, "line_number", instruction.starts_line) or line  # from 3.13 on, a flag
                if instruction.opname in operations and str(instruction.argval).startswith(name):
                    return _where(code, line)
        found = next(iter(self._hidden.codes), None)
        return "an unknown line" if found is None else _where(found, found.co_firstlineno)


def attributes_of(modules: Iterable[nn.Module]) -> Attributes:
    """The submodules of the user's classes, each with a copy of its attributes."""
    owners = {id(owner): owner for module in modules for owner in module.modules() if is_users_object(owner)}
    return [(owner, dict(vars(owner))) for owner in owners.values()]


def _state(generator: Any) -> str:
    """The state of a generator of NumPy."""
    return repr(generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state)


def _warn(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, SideEffectWarning, stacklevel=2)


_warned: set[str] = set()


def _where(code: CodeType, line: int) -> str:
    source = source_at(code.co_filename, line)
    return f"{source} (`{source.code}`)" if source.code else str(source)


def _is_traced(value: Any) -> bool:
    return isinstance(value, (FakeTensor, FunctionalTensor))
