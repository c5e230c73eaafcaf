"""Comparisons of a value: by identity in generated code, by content where that differs.

A check holds nothing alive that allows weak references: what is gone can never be met again.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeAlias

import torch

from spmd.api.guards.kinds import brief, is_plain, key_of_value
from spmd.api.guards.limits import NUMEL
from spmd.core.modules import ModuleStructure, reader, version_of

Refer: TypeAlias = Callable[[Any], str]
"""The name of an object in generated code."""


class Check:
    """One comparison of a value with what it was when the function was traced."""

    def test(self, name: str, refer: Refer) -> str:
        """An expression of generated code about the variable `name`."""
        raise NotImplementedError

    def holds(self, value: Any) -> bool:
        """Test whether a value has the content that it had."""
        raise NotImplementedError

    def refresh(self, value: Any) -> None:
        """Take an equal value as the one to be identical with."""

    @property
    def is_dead(self) -> bool:
        """True if it can never hold again."""
        return False

    def text(self) -> str:
        """The earlier value, for a message."""
        return "another"


class ByValue(Check):
    """A number, a text and the like."""

    def __init__(self, value: Any) -> None:
        self.value, self._key = value, key_of_value(value)

    def test(self, name: str, refer: Refer) -> str:
        return f"{name} is {refer(self.value)}"

    def holds(self, value: Any) -> bool:
        return value is self.value or (type(value) is type(self.value) and key_of_value(value) == self._key)

    def refresh(self, value: Any) -> None:
        self.value = value

    def text(self) -> str:
        return brief(self.value)


class ByIdentity(Check):
    """An object that is itself; one without weak references by its own equality, if it has a hash."""

    def __init__(self, value: Any) -> None:
        self._get = _reference(value)
        self._key = None if isinstance(self._get, weakref.ref) else key_of_value(value)

    def test(self, name: str, refer: Refer) -> str:
        value = self._get()
        if not isinstance(self._get, weakref.ref):
            return f"{name} is {refer(value)}"
        return f"{name} is {refer(self._get)}()"

    def holds(self, value: Any) -> bool:
        now = self._get()
        if isinstance(self._get, weakref.ref):
            return now is not None and value is now
        return value is now or (self._key is not None and type(value) is type(now) and key_of_value(value) == self._key)

    @property
    def is_dead(self) -> bool:
        return isinstance(self._get, weakref.ref) and self._get() is None


class OfType(Check):
    """The type of a value."""

    def __init__(self, value: Any) -> None:
        self._identity = ByIdentity(type(value))

    def test(self, name: str, refer: Refer) -> str:
        return self._identity.test(f"type({name})", refer)

    def holds(self, value: Any) -> bool:
        return self._identity.holds(type(value))

    @property
    def is_dead(self) -> bool:
        return self._identity.is_dead

    def text(self) -> str:
        return "of another type"


class IsThere(Check):
    """Something is there."""

    def __init__(self, value: Any) -> None: ...

    def test(self, name: str, refer: Refer) -> str:
        return f"({name},)"

    def holds(self, value: Any) -> bool:
        return True

    def text(self) -> str:
        return "there"


class OfFunction(Check):
    """A Python function: by its code and its globals, so one that is defined again in the same words is the same."""

    def __init__(self, value: FunctionType) -> None:
        self._get: Any = weakref.ref(value)
        self._code, self._globals = value.__code__, value.__globals__

    def test(self, name: str, refer: Refer) -> str:
        return f"{name} is {refer(self._get)}()"

    def holds(self, value: Any) -> bool:
        if value is self._get():
            return value.__code__ is self._code
        return isinstance(value, FunctionType) and value.__code__ == self._code and value.__globals__ is self._globals

    def refresh(self, value: Any) -> None:
        self._get = weakref.ref(value)


class OfSize(Check):
    """The number of items of a row."""

    def __init__(self, value: Any) -> None:
        self._count = len(value)

    def test(self, name: str, refer: Refer) -> str:
        return f"len({name}) == {self._count}"

    def holds(self, value: Any) -> bool:
        return hasattr(value, "__len__") and len(value) == self._count

    def text(self) -> str:
        return f"of {self._count} items"


class OfKeys(Check):
    """The keys of a mapping, in order."""

    def __init__(self, value: Any) -> None:
        self._names = list(value)

    def test(self, name: str, refer: Refer) -> str:
        return f"list({name}) == {refer(self._names)}"

    def holds(self, value: Any) -> bool:
        return isinstance(value, Iterable) and list(value) == self._names

    def text(self) -> str:
        return f"of the keys {self._names!r:.60}"


class OfItems(Check):
    """The items of a container whose items are plain values."""

    def __init__(self, value: Any) -> None:
        self._kind, self._items = type(value), tuple(value)
        self._keys = self._key(value)

    def _key(self, value: Any) -> Any:
        keys = map(key_of_value, value)
        return frozenset(keys) if isinstance(value, (set, frozenset)) else tuple(keys)

    def test(self, name: str, refer: Refer) -> str:
        items = refer(self._items)
        return f"len({name}) == {len(self._items)} and all(map({refer(operator.is_)}, {name}, {items}))"

    def holds(self, value: Any) -> bool:
        if type(value) is not self._kind or len(value) != len(self._items):
            return False
        return all(map(operator.is_, value, self._items)) or self._key(value) == self._keys

    def refresh(self, value: Any) -> None:
        self._items = tuple(value)

    def text(self) -> str:
        return brief_items(self._items)


def brief_items(items: tuple[Any, ...]) -> str:
    """Plain items in a message."""
    return f"{list(items)!r:.40}"


class OfBytes(Check):
    """The values of an array."""

    def __init__(self, value: Any) -> None:
        self._state = self._read(value)

    @staticmethod
    def _read(value: Any) -> Any:
        return getattr(value, "dtype", None), getattr(value, "shape", None), value.tobytes()

    def test(self, name: str, refer: Refer) -> str:
        return f"{refer(self._read)}({name}) == {refer(self._state)}"

    def holds(self, value: Any) -> bool:
        return hasattr(value, "tobytes") and self._read(value) == self._state


class OfTensor(Check):
    """A tensor by identity and version; a small one by its values where they differ."""

    def __init__(self, value: torch.Tensor) -> None:
        self._get: Any = weakref.ref(value)
        self._version, self._counts = version_of(value), not value.is_inference()
        self._values = _values_of(value)

    def test(self, name: str, refer: Refer) -> str:
        same = f"{name} is {refer(self._get)}()"
        return f"{same} and {name}._version == {self._version}" if self._counts else same

    def holds(self, value: Any) -> bool:
        if value is self._get() and version_of(value) == self._version:
            return True
        return self._values is not None and isinstance(value, torch.Tensor) and _values_of(value) == self._values

    def refresh(self, value: torch.Tensor) -> None:
        self._get, self._version = weakref.ref(value), version_of(value)

    @property
    def is_dead(self) -> bool:
        now = self._get()
        return now is None or not self.holds(now)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensor, while it lives."""
        return [x for x in [self._get()] if x is not None]

    def text(self) -> str:
        return "another tensor, or had other values"


class OfMeta(Check):
    """The properties of a tensor that a program depends on without its values."""

    def __init__(self, value: torch.Tensor) -> None:
        self._meta = _meta_of(value)

    def test(self, name: str, refer: Refer) -> str:
        return f"{refer(_meta_of)}({name}) == {refer(self._meta)}"

    def holds(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and _meta_of(value) == self._meta


class OfModule(Check):
    """A module by its structure, and by the identity and the versions of its tensors."""

    def __init__(self, value: torch.nn.Module) -> None:
        self._get = weakref.ref(value)
        structure, leaves = ModuleStructure.of(value)
        self._key = structure.key
        self._leaves = [OfTensor(leaf) for leaf in leaves]

    def test(self, name: str, refer: Refer) -> str:
        value = self._get()
        if value is None or not self.holds(value):  # gone, or changed by the trace itself
            return "False"
        structure, leaves = ModuleStructure.of(value)
        counted = [leaf for leaf in leaves if not leaf.is_inference()]
        versions = list(map(version_of, counted))
        tests = f"(leaves := {refer(reader(structure))}({name})) is not None"
        tests += f" and all(map({refer(operator.is_)}, leaves, {refer(leaves)}))"
        read = operator.attrgetter("_version")
        return f"{tests} and list(map({refer(read)}, {refer(counted)})) == {refer(versions)}" if counted else tests

    def holds(self, value: Any) -> bool:
        if value is not self._get() or value is None:
            return False
        structure, leaves = ModuleStructure.of(value)
        if structure.key != self._key:
            return False
        return all(check.holds(leaf) for check, leaf in zip(self._leaves, leaves, strict=True))

    def refresh(self, value: torch.nn.Module) -> None:
        for check, leaf in zip(self._leaves, ModuleStructure.of(value)[1], strict=True):
            check.refresh(leaf)

    @property
    def is_dead(self) -> bool:
        return self._get() is None or any(leaf.is_dead for leaf in self._leaves)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Its tensors, while they live."""
        return [x for leaf in self._leaves for x in leaf.tensors]

    def text(self) -> str:
        return "another, or had other tensors or attributes"


class Unwritten(Check):
    """Tensors to which nothing was written, as long as they live."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        self._versions = [(weakref.ref(x), x._version) for x in values]

    def test(self, name: str, refer: Refer) -> str:
        return f"{refer(self)}.holds(None)"

    def holds(self, value: Any) -> bool:
        return all((x := get()) is None or x._version == version for get, version in self._versions)

    @property
    def is_dead(self) -> bool:
        return not self.holds(None)

    def text(self) -> str:
        return "not written to"


class Unshadowed(Check):
    """An object's own attributes do not hide those methods of its class that are called."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def test(self, name: str, refer: Refer) -> str:
        return f"{refer(self.names)}.isdisjoint({name}.__dict__)"

    def holds(self, value: Any) -> bool:
        return self.names.isdisjoint(getattr(value, "__dict__", ()))


def _reference(value: Any) -> Callable[[], Any]:
    """A weak reference, or a function that gives a value which has none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _values_of(value: torch.Tensor) -> Any:
    """The values of a small tensor, exactly."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.numel() > NUMEL or value.layout != torch.strided:
        return None
    if value.is_meta or value.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return None
    # The parts of a tensor as bytes, in which a NaN equals itself and -0.0 differs from 0.0.
    flat = value.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    data = flat.view(torch.uint8).tolist() if flat.numel() else []
    return value.dtype, tuple(value.shape), value.device, value.requires_grad, bytes(data)


def _meta_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    return type(value), value.dtype, tuple(value.shape), value.device, value.requires_grad


def check_of(value: Any) -> Check:
    """The comparison of an object that has no content that could be looked at."""
    return ByValue(value) if is_plain(value) else ByIdentity(value)
