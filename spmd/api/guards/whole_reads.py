"""Reads of whole objects by code that is not followed: compared by content, up to a limit."""

from __future__ import annotations

import enum
import functools
import io
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from spmd.api.guards.access import Access, Attribute, Line
from spmd.api.guards.checks import (
    ByIdentity,
    ByValue,
    OfBytes,
    OfItems,
    OfKeys,
    OfSize,
    OfTensor,
    OfType,
)
from spmd.api.guards.following import Following
from spmd.api.guards.kinds import (
    LOOKUPS,
    MAPPINGS,
    NAMESPACES,
    ROWS,
    SETS,
    is_array,
    is_generator,
    is_own_module,
    is_plain,
    is_users_object,
    wrapped_by,
)
from spmd.api.guards.limits import BYTES, DEPTH, ITEMS
from spmd.api.guards.members import attributes_of, member, slots_of
from spmd.api.guards.things import (
    UNKNOWN,
    Bound,
    BuiltinMethod,
    Made,
    Parts,
    Values,
)

_SPECIAL = ("__call__", "__len__", "__bool__", "__iter__", "__contains__", "__getitem__", "__enter__", "__exit__")


class WholeReads(Following):
    """Compares contents."""

    def whole(self, values: Values, line: Line) -> None:
        """Compare all that a value is: code that is not followed has it."""
        for thing in values:
            if isinstance(thing, Access):
                self.content(thing, line)
            elif isinstance(thing, Parts):
                for item in thing.items:
                    self.whole(item, line)
            elif isinstance(thing, Made):
                self.run_unknown(thing, line)
            elif isinstance(thing, Bound):
                self.call((thing.function,), [(thing.owner,), *[UNKNOWN] * 8], {}, line)
            elif isinstance(thing, BuiltinMethod):
                self.whole((thing.owner,), line)

    whole_where_kept = whole

    def content(self, access: Access, line: Line) -> None:
        value = access.value
        if id(access) in self._whole:
            return
        self._whole.add(id(access))
        if access.covered and not isinstance(value, (FunctionType, nn.Module)):
            return
        if is_plain(value):
            access.expect(ByValue)
        elif isinstance(value, torch.Tensor):
            access.expect(OfTensor)
        elif isinstance(value, nn.Module):
            self.call_of_module(access, [], {}, line)
        elif isinstance(value, ModuleType):
            self._content_of_namespace(access, line)
        elif isinstance(value, (FunctionType, MethodType, functools.partial)):
            self.call((access,), [UNKNOWN] * 8, {}, line)
        elif (wrapped := wrapped_by(value)) is not None:
            self.content(access.child(Attribute("__wrapped__"), wrapped, line, watched=access.watched), line)
        elif isinstance(value, (*ROWS, *SETS, *MAPPINGS)):
            self._content_of_container(access, line)
        elif is_array(value):
            self._content_of_array(access, line)
        elif is_generator(value):
            self.draws.append((access.label, value, line))
        elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            self.iterators.append((access.label, line))
        elif isinstance(value, LOOKUPS):
            self._content_of_lookup(access, line)
        elif isinstance(value, (type, enum.Enum)) or not self._has_attributes(value):
            access.expect(ByIdentity)
        elif access.watched:
            self._content_of_object(access, line)

    @staticmethod
    def _has_attributes(value: Any) -> bool:
        """Test for an object of Python code, whose attributes are its content."""
        if is_users_object(value) or isinstance(value, NAMESPACES):
            return True
        module = type(value).__module__
        return module.startswith(("torch.optim", "torch.amp", "torch.distributions")) and hasattr(value, "__dict__")

    def _spend(self, count: int, access: Access, line: Line) -> bool:
        """Admit so many more items to compare, or note that they are not."""
        self._items += count
        if self._items <= ITEMS and access.depth <= DEPTH:
            return True
        self._items -= count
        if access.watched:
            self.unwatched.setdefault(line, access.label)
        return False

    def _content_of_container(self, access: Access, line: Line) -> None:
        value = access.value
        items = list(value.values()) if isinstance(value, MAPPINGS) else list(value)
        if not self._spend(len(items), access, line):
            access.expect(OfSize)
            return
        if isinstance(value, MAPPINGS):
            access.expect(OfKeys)
        elif all(map(is_plain, items)):
            access.expect(OfItems)
            return
        elif isinstance(value, SETS):
            access.expect(ByIdentity)
            access.expect(OfSize)
            return
        else:
            access.expect(OfType)
            access.expect(OfSize)
        for child in self.items_of(access, line):
            if isinstance(child, Access):
                self.content(child, line)

    def _content_of_lookup(self, access: Access, line: Line) -> None:
        if not self._spend(len(access.value), access, line):
            return
        if hasattr(access.value, "keys"):
            access.expect(OfKeys)
        else:
            access.expect(OfSize)
        for child in self.items_of(access, line):
            if isinstance(child, Access):
                self.content(child, line)

    def _content_of_array(self, access: Access, line: Line) -> None:
        nbytes = getattr(access.value, "nbytes", None) or len(access.value) * getattr(access.value, "itemsize", 1)
        if nbytes > BYTES:
            if access.watched:
                self.unwatched.setdefault(line, access.label)
            access.expect(ByIdentity)
        else:
            access.expect(OfBytes)

    def _content_of_namespace(self, access: Access, line: Line) -> None:
        access.expect(ByIdentity)
        if is_own_module(access.value):
            for name, value in list(vars(access.value).items()):
                if not name.startswith("__") and (
                    is_plain(value) or isinstance(value, (*ROWS, *MAPPINGS, torch.Tensor))
                ):
                    self.content(access.child(Attribute(name), value, line), line)

    def _content_of_object(self, access: Access, line: Line) -> None:
        value = access.value
        access.expect(OfType)
        names = [*attributes_of(value), *slots_of(value)]
        if not self._spend(len(names), access, line):
            return
        if attributes_of(value):
            access.child(Attribute("__dict__"), vars(value), line).expect(OfKeys)
        for name in names:
            if not name.startswith("_spmd") and hasattr(value, name):
                self.content(access.child(Attribute(name), getattr(value, name), line), line)
        for name in _SPECIAL:
            if isinstance(member(type(value), name)[1], FunctionType):
                self.call(self.member_of(type(value), name, access, line), [UNKNOWN] * 3, {}, line)
