"""Attributes: of objects, classes, modules, tensors and layers."""

from __future__ import annotations

import collections
import enum
import functools
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn

from spmd.api.guards.access import Access, Attribute, ClassMember, Line
from spmd.api.guards.builtin_calls import METHODS
from spmd.api.guards.checks import (
    ByIdentity,
    IsThere,
    OfMeta,
    OfModule,
    OfTensor,
    OfType,
    Unshadowed,
)
from spmd.api.guards.following import Following
from spmd.api.guards.kinds import (
    LOOKUPS,
    MAPPINGS,
    ROWS,
    SETS,
    draws,
    is_generator,
    is_own,
    is_own_module,
    is_plain,
    is_tensor_library,
)
from spmd.api.guards.members import attributes_of, member
from spmd.api.guards.things import (
    UNKNOWN,
    Bound,
    BuiltinMethod,
    Constant,
    Fixed,
    Parts,
    Super,
    Values,
    constant,
    union,
)

_METADATA = frozenset(
    ["shape", "dtype", "device", "ndim", "size", "dim", "is_cuda", "numel", "requires_grad", "layout"]
)
_FIELD = type(vars(collections.namedtuple("_Named", "field"))["field"])  # what reads a field of a named tuple
_Cached = type(functools.lru_cache(len))


class Attributes(Following):
    """Follows attributes."""

    def attribute(self, values: Values, name: str, line: Line) -> Values:
        """An attribute."""
        return union(*(self._attribute(thing, name, line) for thing in values)) or UNKNOWN

    def _attribute(self, thing: Any, name: str, line: Line) -> Values:
        if isinstance(thing, Access):
            return self._attribute_of(thing, name, line)
        if isinstance(thing, (Constant, Parts)):
            return (BuiltinMethod(name, thing),)
        if isinstance(thing, Super):
            return self.member_of(type(thing.owner.value), name, thing.owner, line, after=thing.kind)
        if isinstance(thing, Fixed):
            value = getattr(thing.value, name, None)
            return constant(value) if is_plain(value) else (Fixed(value),)
        self.whole((thing,), line)
        return UNKNOWN

    def _attribute_of(self, access: Access, name: str, line: Line) -> Values:
        value = access.value
        if isinstance(value, torch.Tensor):
            return self._attribute_of_tensor(access, name, line)
        if isinstance(value, ModuleType):
            return self._attribute_of_module(access, name, line)
        if name == "__dict__":
            self.whole((access,), line)
            return UNKNOWN
        if name == "__class__":
            access.expect(OfType)
            kind: Any = type(value)
            return (self.root(kind, kind.__name__, line, watched=is_own(kind)),)
        if isinstance(value, type):
            return self.member_of(value, name, access, line)
        if is_generator(value):
            self.draws.append((access.label, value, line))
            return UNKNOWN
        if isinstance(value, enum.Enum) and name in ("name", "value", "_value_", "_name_"):
            access.expect(ByIdentity)
            return constant(getattr(value, name))
        if isinstance(value, LOOKUPS) and name in METHODS:
            return (BuiltinMethod(name, access),)
        return self._attribute_of_object(access, name, line)

    def _attribute_of_tensor(self, access: Access, name: str, line: Line) -> Values:
        if name in getattr(access.value, "__dict__", ()):
            return (access.child(Attribute(name), vars(access.value)[name], line),)
        if name in _METADATA:
            access.expect(OfMeta)
            return UNKNOWN
        access.expect(OfTensor)
        return (BuiltinMethod(name, access),)

    def _attribute_of_module(self, access: Access, name: str, line: Line) -> Values:
        access.expect(ByIdentity)
        if draws(access.value):
            self.draws.append((access.value.__name__, None, line))
        if name not in vars(access.value):
            return UNKNOWN
        value = vars(access.value)[name]
        if is_own_module(access.value):
            watched = True
        elif is_tensor_library(access.value):
            watched = isinstance(value, (*LOOKUPS, *ROWS, *SETS, *MAPPINGS))
        else:  # an installed package, whose own objects are its own
            watched = is_plain(value) or isinstance(value, (*ROWS, *SETS, *MAPPINGS))
        return (access.child(Attribute(name), value, line, watched=watched),)

    def _attribute_of_object(self, access: Access, name: str, line: Line) -> Values:
        value = access.value
        own = attributes_of(value)
        base, raw = member(type(value), name)
        if isinstance(raw, property):
            return self.member_of(type(value), name, access, line)
        if isinstance(raw, MemberDescriptorType):
            return self._present(access, Attribute(name), line)
        if isinstance(value, nn.Module):
            return self._attribute_of_layer(access, name, line)
        if name in own:
            return (access.child(Attribute(name), own[name], line),)
        if base is not None:
            return self.member_of(type(value), name, access, line)
        _, fallback = member(type(value), "__getattr__")
        if access.is_compared:
            access.absent.add(Attribute(name)) if fallback is None else access.add(Unshadowed).names.add(name)  # type: ignore[attr-defined]
        if isinstance(fallback, FunctionType):
            return self.call(self.member_of(type(value), "__getattr__", access, line), [constant(name)], {}, line)
        return UNKNOWN

    def _attribute_of_layer(self, access: Access, name: str, line: Line) -> Values:
        """An attribute of a module, whose structure and tensors are compared as a whole."""
        if not access.covered:
            access.expect(OfModule)
        value, own = access.value, vars(access.value)
        if name in own["_modules"]:
            return (self.inner(access, name, own["_modules"][name], line),)
        if name in own["_parameters"] or name in own["_buffers"]:
            return UNKNOWN
        if name in own:
            return (access.child(Attribute(name), own[name], line, watched=False),)
        return self.member_of(type(value), name, access, line)

    def inner(self, access: Access, name: str, value: Any, line: Line) -> Access:
        """A submodule, which its parent's comparison covers."""
        child = access.child(Attribute(name), value, line, watched=False)
        child.covered = True
        return child

    def _present(self, access: Access, step: Attribute, line: Line) -> Values:
        try:
            value = step.of(access.value)
        except AttributeError:
            return UNKNOWN
        return (access.child(step, value, line),)

    def member_of(self, kind: type, name: str, access: Access, line: Line, after: Any = None) -> Values:
        """A member of a class or of its bases, for an instance or the class."""
        base, raw = member(kind, name, after)
        if base is None:
            return UNKNOWN
        is_class = isinstance(access.value, type)
        holder = self.root(base, base.__name__, line, watched=is_own(base))
        followed = (FunctionType, property, classmethod, staticmethod, functools.cached_property, _Cached)
        if isinstance(raw, followed):
            if not is_class:
                access.expect(OfType)
                if isinstance(raw, FunctionType) and access.is_compared and attributes_of(access.value):
                    access.add(Unshadowed).names.add(name)  # type: ignore[attr-defined]
            own = holder.child(ClassMember(name), raw, line, watched=holder.watched)
            return self._bound(own, raw, access, line)
        if isinstance(raw, type) or is_plain(raw) or not hasattr(type(raw), "__get__"):
            return (access.child(Attribute(name), raw, line),)
        if isinstance(getattr(type(raw), "__get__", None), FunctionType):  # a descriptor of the user's
            self.whole((access, holder.child(ClassMember(name), raw, line, watched=holder.watched)), line)
            return UNKNOWN
        if type(raw) is _FIELD:
            return self._present(access, Attribute(name), line)
        return (BuiltinMethod(name, access),)

    def _bound(self, member: Access, raw: Any, access: Access, line: Line) -> Values:
        if isinstance(raw, FunctionType):
            return (member,) if isinstance(access.value, type) else (Bound(member, access),)
        member.expect(ByIdentity)
        if isinstance(raw, staticmethod):
            return (member.child(Attribute("__func__"), raw.__func__, line, watched=member.watched),)
        if isinstance(raw, classmethod):
            owner = access if isinstance(access.value, type) else self.root(type(access.value), access.label, line)
            return (Bound(member.child(Attribute("__func__"), raw.__func__, line, watched=member.watched), owner),)
        if isinstance(raw, _Cached):
            inner = member.child(Attribute("__wrapped__"), raw.__wrapped__, line, watched=member.watched)
            return (inner,) if isinstance(access.value, type) else (Bound(inner, access),)
        if isinstance(access.value, type):
            return UNKNOWN
        name = "fget" if isinstance(raw, property) else "func"
        getter = member.child(Attribute(name), getattr(raw, name), line, watched=member.watched)
        return self.call((Bound(getter, access),), [], {}, line)

    def super_of(self, kind: Values, owner: Values) -> Values:
        """The result of `super()`."""
        kinds = [thing.value for thing in kind if isinstance(getattr(thing, "value", None), type)]
        owners = [thing for thing in owner if isinstance(thing, Access) and not isinstance(thing.value, type)]
        return tuple(Super(k, o) for k in kinds for o in owners) or UNKNOWN

    def expect_present(self, access: Access, name: str, line: Line) -> None:
        """Compare that an object has an attribute."""
        if name in attributes_of(access.value):
            access.child(Attribute(name), vars(access.value)[name], line).expect(IsThere)
