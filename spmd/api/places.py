"""Places where functions read values, and what these values are: code, containers, generators, constants."""

from __future__ import annotations

import dis
import functools
import random
import sys
from collections.abc import Container, Iterator
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import attrs
import torch

from spmd.core.modules import Same
from spmd.core.static_key import static_key
from spmd.job.user_code import is_user_file

VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""The types of values that are compared, and not their identity."""


@attrs.frozen(eq=False)
class Place:
    """Where a function reads a value.

    Args:
        label: its name in messages.
        holder: the namespace that has it, the slots of an object, or the cell of a closure.
        name: its name in the namespace.
        value: what it holds.
    """

    label: str
    holder: Any
    name: str
    value: Any

    @property
    def now(self) -> Any:
        """What it holds now."""
        return self.holder.cell_contents if isinstance(self.holder, CellType) else self.holder[self.name]

    @property
    def is_changed(self) -> bool:
        """Whether it holds something else now; not where it holds nothing any more."""
        try:
            return self.now is not self.value
        except (KeyError, ValueError, AttributeError):
            return False


class Slots:
    """The slots of an object, as a namespace."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        kinds = type(owner).__mro__
        self.names = {n for kind in kinds for n, x in vars(kind).items() if isinstance(x, MemberDescriptorType)}

    def __contains__(self, name: str) -> bool:
        return name in self.names and hasattr(self.owner, name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self.owner, name)

    def items(self) -> Iterator[tuple[str, Any]]:
        """The names and values of those that have one."""
        return ((name, self[name]) for name in sorted(self.names) if name in self)


def same(one: Any, other: Any) -> bool:
    """Whether two are one object."""
    return one is other


def items_of(container: Any) -> list[Any]:
    """The items of a container, the values of a dict."""
    return list(dict.values(container) if isinstance(container, dict) else container)


def wrapped_by(value: Any) -> Any:
    """The function in a property, a static method, a class method and other descriptors and wrappers; else None."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return getattr(value, "__wrapped__", None) if callable(value) or isinstance(value, classmethod) else None


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers of Python or NumPy that has a state."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[str, ...]:
    """The global names and attributes in a code object and in functions that it makes, each once."""
    return tuple(dict.fromkeys(name for each in nested(code) for name in each.co_names))


def names_but(code: CodeType, ignored: Container[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """As `names_in`, and the variables of its closure, without what only ignored functions read that it makes."""
    codes = [each for each in nested(code) if id(each) not in ignored]
    reads = {i.argval for each in codes for i in dis.get_instructions(each) if "_DEREF" in i.opname}
    names = tuple(dict.fromkeys(name for each in codes for name in each.co_names))
    return names, tuple(name for name in code.co_freevars if name in reads)


def nested(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of functions that it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


@functools.lru_cache(maxsize=4096)
def is_users(kind: Any) -> bool:
    """Whether a class is one of the user's code."""
    module = sys.modules.get(kind.__module__)
    return module is not None and is_user_file(
        getattr(module, "__file__", None) or "<stdin>" * (kind.__module__ == "__main__")
    )


def is_users_object(value: object) -> bool:
    """Whether an object is of a class of the user's code."""
    kind: Any = type(value)
    return is_users(kind)


def is_library(value: Any) -> bool:
    """Whether a value is a function, class or module that is not the user's, which nobody changes."""
    if isinstance(value, ModuleType):
        return not is_user_file(getattr(value, "__file__", None) or "<frozen>")
    if isinstance(value, FunctionType):
        return not is_user_file(value.__code__.co_filename)
    if isinstance(value, type):
        return not is_users(value)
    return callable(value) and type(value).__module__ == "builtins" and not isinstance(value, MethodType)


def container_key(value: Any) -> Any:
    """A key of the items of a container."""
    if isinstance(value, dict):
        return tuple((_item_key(name), _item_key(item)) for name, item in dict.items(value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_item_key, value))
    return type(value), tuple(map(_item_key, value))


def _item_key(value: Any) -> Any:
    return static_key(value) if type(value) in VALUES else Same(value)


def shown(key: Any) -> str:
    """A key in a message."""
    if type(key) is tuple and len(key) == 2 and isinstance(key[0], type):
        return brief(key[1])
    return "not there" if key is None else "another"


def brief(value: Any) -> str:
    """A value in a message."""
    return f"{value!r:.40}" if type(value) in VALUES else type(value).__name__
