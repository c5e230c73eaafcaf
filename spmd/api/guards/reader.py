"""Follows what bytecode names: attributes, items, calls; and decides how each value that is read is compared."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import io
from collections.abc import Iterator, Sequence
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from spmd.api.guards.access import Access, Attribute, Closure, Item, Line, Member, Step
from spmd.api.guards.builtin_calls import FUNCTIONS, HOST_CALLS, METHODS, method
from spmd.api.guards.checks import (
    ByIdentity,
    ByValue,
    IsThere,
    OfBytes,
    OfFunction,
    OfItems,
    OfKeys,
    OfMeta,
    OfModule,
    OfSize,
    OfTensor,
    OfType,
    Unshadowed,
)
from spmd.api.guards.frame import Frame
from spmd.api.guards.kinds import (
    LOOKUPS,
    MAPPINGS,
    NAMESPACES,
    ROWS,
    SETS,
    draws,
    is_array,
    is_generator,
    is_library_code,
    is_own,
    is_own_code,
    is_own_module,
    is_plain,
    is_tensor_library,
    is_users_object,
    wrapped_by,
)
from spmd.api.guards.things import (
    UNKNOWN,
    Bound,
    BuiltinMethod,
    Constant,
    Fixed,
    Made,
    Parts,
    Super,
    Values,
    constant,
    plain_value,
    union,
)

ITEMS, BYTES = 8192, 1 << 18
"""The most items of containers, and bytes of arrays, that are compared at a call."""
_STEPS, _DEPTH = 200_000, 80  # the most instructions that are followed, and calls in calls
_METADATA = frozenset(
    ["shape", "dtype", "device", "ndim", "size", "dim", "is_cuda", "numel", "requires_grad", "layout"]
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FIELD = type(vars(collections.namedtuple("_Named", "field"))["field"])  # what reads a field of a named tuple
_SPECIAL = ("__call__", "__len__", "__bool__", "__iter__", "__contains__", "__getitem__", "__enter__", "__exit__")


class Reader:
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
        self._whole: set[int] = set()
        self._modules: set[int] = set()
        self._steps = self._items = self._depth = 0

    def root(self, value: Any, label: str, line: Line, *, watched: bool = True, covered: bool = False) -> Access:
        """The access of an object that stays what it is."""
        found = self.roots.get(id(value))
        if found is None:
            found = self.roots[id(value)] = Access(None, None, value, label, line, watched=watched, covered=covered)
        return found

    def count(self, line: Line) -> None:
        """Count an instruction.

        Raises:
            TooMuch: there were too many.
        """
        self._steps += 1
        if self._steps > _STEPS:
            raise TooMuch(line)

    # Names

    def name(self, names: Access, name: str, line: Line) -> Values:
        """A global, or a name of Python's own."""
        if name in names.value:
            value = names.value[name]
            return (names.child(Item(name), value, line, watched=names.watched or isinstance(value, LOOKUPS)),)
        builtins = names.value.get("__builtins__", {})
        own = builtins if isinstance(builtins, dict) else vars(builtins)
        if name in own:
            value = own[name]
            return constant(value) if is_plain(value) else (Fixed(value),)
        return UNKNOWN

    def cell(self, cell: Any, line: Line) -> Values:
        """A variable of an enclosing function."""
        if isinstance(cell, tuple):
            frame, name = cell
            return union(frame.own_cells[name], frame.local.get(name, ()))
        return () if cell is None else (cell,)

    def imported(self, name: str) -> Values:
        """A module that the function imports."""
        import sys

        module = sys.modules.get(name.partition(".")[0] if "." in name else name)
        return UNKNOWN if module is None else (self.root(module, name, ("", 0), watched=False),)

    def made(self, function: Made) -> Made:
        """The one function of such code and variables."""
        key = function.code, function.defaults, tuple(map(id, function.cells.values()))
        return self._made.setdefault(key, function)

    # Attributes

    def attribute(self, values: Values, name: str, line: Line) -> Values:
        """An attribute."""
        return union(*(self._attribute(thing, name, line) for thing in values)) or UNKNOWN

    def _attribute(self, thing: Any, name: str, line: Line) -> Values:
        if isinstance(thing, Access):
            return self._attribute_of(thing, name, line)
        if isinstance(thing, (Constant, Parts)):
            return (BuiltinMethod(name, thing),)
        if isinstance(thing, Super):
            return self._member_of(type(thing.owner.value), name, thing.owner, line, after=thing.kind)
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
            return self._member_of(value, name, access, line)
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
        fixed = isinstance(value, (FunctionType, type, ModuleType)) or callable(value)
        if is_own_module(access.value):
            watched = True
        elif is_tensor_library(access.value):
            watched = isinstance(value, (*LOOKUPS, *ROWS, *SETS, *MAPPINGS))
        else:
            watched = not fixed
        return (access.child(Attribute(name), value, line, watched=watched),)

    def _attribute_of_object(self, access: Access, name: str, line: Line) -> Values:
        value = access.value
        own = _attributes(value)
        base, raw = _member(type(value), name)
        if isinstance(raw, property):
            return self._member_of(type(value), name, access, line)
        if isinstance(raw, MemberDescriptorType):
            return self._present(access, Attribute(name), line)
        if isinstance(value, nn.Module):
            return self._attribute_of_layer(access, name, line)
        if name in own:
            return (access.child(Attribute(name), own[name], line),)
        if base is not None:
            return self._member_of(type(value), name, access, line)
        _, fallback = _member(type(value), "__getattr__")
        if access.is_compared:
            access.absent.add(Attribute(name)) if fallback is None else access.add(Unshadowed).names.add(name)  # type: ignore[attr-defined]
        if isinstance(fallback, FunctionType):
            return self.call(self._member_of(type(value), "__getattr__", access, line), [constant(name)], {}, line)
        return UNKNOWN

    def _attribute_of_layer(self, access: Access, name: str, line: Line) -> Values:
        """An attribute of a module, whose structure and tensors are compared as a whole."""
        if not access.covered:
            access.expect(OfModule)
        value, own = access.value, vars(access.value)
        if name in own["_modules"]:
            return (self._inner(access, name, own["_modules"][name], line),)
        if name in own["_parameters"] or name in own["_buffers"]:
            return UNKNOWN
        if name in own:
            child = access.child(Attribute(name), own[name], line, watched=False)
            return (child,)
        return self._member_of(type(value), name, access, line)

    def _inner(self, access: Access, name: str, value: Any, line: Line) -> Access:
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

    def _member_of(self, kind: type, name: str, access: Access, line: Line, after: Any = None) -> Values:
        """What a class or one of its bases has of a name, for an instance or for the class itself."""
        base, raw = _member(kind, name, after)
        if base is None:
            return UNKNOWN
        is_class = isinstance(access.value, type)
        holder = self.root(base, base.__name__, line, watched=is_own(base))
        if isinstance(raw, (FunctionType, property, classmethod, staticmethod, functools.cached_property)):
            if not is_class:
                access.expect(OfType)
                if (
                    isinstance(raw, FunctionType)
                    and access.watched
                    and not access.covered
                    and _attributes(access.value)
                ):
                    access.add(Unshadowed).names.add(name)  # type: ignore[attr-defined]
            member = holder.child(Member(name), raw, line, watched=holder.watched)
            return self._bound(member, raw, access, line)
        if isinstance(raw, (FunctionType, type)) or is_plain(raw) or not hasattr(type(raw), "__get__"):
            return (access.child(Attribute(name), raw, line),)
        if isinstance(getattr(type(raw), "__get__", None), FunctionType):  # a descriptor of the user's
            self.whole((access, holder.child(Member(name), raw, line, watched=holder.watched)), line)
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
        if isinstance(access.value, type):
            return UNKNOWN
        name = "fget" if isinstance(raw, property) else "func"
        getter = member.child(Attribute(name), getattr(raw, name), line, watched=member.watched)
        return self.call((Bound(getter, access),), [], {}, line)

    def super_of(self, kind: Values, owner: Values) -> Values:
        """What `super()` gives."""
        kinds = [thing.value for thing in kind if isinstance(getattr(thing, "value", None), type)]
        owners = [thing for thing in owner if isinstance(thing, Access) and not isinstance(thing.value, type)]
        return tuple(Super(k, o) for k in kinds for o in owners) or UNKNOWN

    def expect_present(self, access: Access, name: str, line: Line) -> None:
        """Compare that an object has an attribute."""
        if name in _attributes(access.value):
            access.child(Attribute(name), vars(access.value)[name], line).expect(IsThere)

    # Items

    def item(self, owner: Values, key: Values, line: Line) -> Values:
        """An item by its key."""
        self.whole(key, line)
        keys = [plain_value((thing,)) for thing in key]
        if not keys or not all(known for known, _ in keys):
            return union(*(self._any_item(thing, key, line) for thing in owner)) or UNKNOWN
        return union(*(self._item(thing, k, line) for thing in owner for _, k in keys)) or UNKNOWN

    def _item(self, thing: Any, key: Any, line: Line) -> Values:
        if isinstance(thing, Parts):
            if thing.names is not None and key in thing.names:
                return thing.items[thing.names.index(key)]
            exact = thing.names is None and type(key) is int and -len(thing.items) <= key < len(thing.items)
            return thing.items[key] if exact and len(thing.items) > 1 else union(*thing.items)
        if not isinstance(thing, Access) or not has_items(thing.value):
            return self._any_item(thing, constant(key), line)
        try:
            if isinstance(thing.value, dict) and not dict.__contains__(thing.value, key):
                raise KeyError(key)
            value = thing.value[key]
        except Exception:
            self._absent(thing, Item(key))
            return UNKNOWN
        return (thing.child(Item(key), value, line),)

    def _absent(self, access: Access, step: Step) -> None:
        if access.is_compared:
            access.absent.add(step)

    def _any_item(self, thing: Any, key: Values, line: Line) -> Values:
        """An item by a key that is not known, or of an object with items of its own."""
        if isinstance(thing, Parts):
            return union(*thing.items)
        if not isinstance(thing, Access):
            self.whole((thing,), line)
            return UNKNOWN
        if isinstance(thing.value, nn.Module):
            return self.iterated((thing,), line)
        _, special = _member(type(thing.value), "__getitem__")
        if isinstance(special, FunctionType) and not isinstance(thing.value, (type, torch.Tensor)):
            return self.call(self._member_of(type(thing.value), "__getitem__", thing, line), [key], {}, line)
        self.whole((thing,), line)
        return union(self.items_of(thing, line)) or UNKNOWN

    def items_of(self, access: Access, line: Line) -> Values:
        """The items of a container, each by its place or key."""
        value = access.value
        if not has_items(value) or len(value) > ITEMS:
            return UNKNOWN
        if isinstance(value, (*MAPPINGS, *LOOKUPS)) and hasattr(value, "keys"):
            return tuple(access.child(Item(key), value[key], line) for key in list(value.keys()))
        return tuple(access.child(Item(n), item, line) for n, item in enumerate(value))

    def with_default(self, owner: Values, key: Values, default: Values, line: Line) -> Values:
        """What `get` of a mapping gives."""
        known, name = plain_value(key)
        found: list[Values] = []
        for thing in owner:
            values = self.item((thing,), key, line)
            missing = (
                isinstance(thing, Access) and known and isinstance(thing.value, MAPPINGS) and name not in thing.value
            )
            found += [default] if missing else [values] if known else [values, default]
        return union(*found)

    def contains(self, owner: Values, key: Values, negated: bool, line: Line) -> Values:
        """Whether a container has a key or an item."""
        self.whole(key, line)
        known, name = plain_value(key)
        if known and len(owner) == 1:
            (thing,) = owner
            if isinstance(thing, Access) and isinstance(thing.value, (*MAPPINGS, *LOOKUPS)) and has_items(thing.value):
                is_there = name in thing.value
                if not is_there:
                    self._absent(thing, Item(name))
                else:
                    thing.child(Item(name), thing.value[name], line).expect(IsThere)
                return constant(is_there != negated)
            if isinstance(thing, Parts) and all(plain_value(item)[0] for item in thing.items):
                return constant((name in [plain_value(item)[1] for item in thing.items]) != negated)
            if (
                isinstance(thing, Access)
                and isinstance(thing.value, (*ROWS, *SETS))
                and all(map(is_plain, thing.value))
            ):
                self.whole(owner, line)
                return constant((name in thing.value) != negated)
        for thing in owner:
            special = _member(type(thing.value), "__contains__")[1] if isinstance(thing, Access) else None
            if isinstance(special, FunctionType):
                self.call(self._member_of(type(thing.value), "__contains__", thing, line), [key], {}, line)
            else:
                self.whole((thing,), line)
        return UNKNOWN

    def iterated(self, values: Values, line: Line) -> Values:
        """What iteration gives: any of the items."""
        return union(*(self._iterated(thing, line) for thing in values)) or UNKNOWN

    def _iterated(self, thing: Any, line: Line) -> Values:
        if isinstance(thing, Parts):
            return tuple(x for n in thing.names for x in constant(n)) if thing.names else union(*thing.items)
        if not isinstance(thing, Access):
            self.whole((thing,), line)
            return UNKNOWN
        value = thing.value
        if isinstance(value, nn.Module):
            thing.expect(OfModule)
            return tuple(self._inner(thing, name, inner, line) for name, inner in value._modules.items()) or UNKNOWN
        if isinstance(value, MAPPINGS) and len(value) <= ITEMS:
            thing.expect(OfKeys)
            return union(*(constant(key) if is_plain(key) else UNKNOWN for key in value))
        if isinstance(value, ROWS) and len(value) <= ITEMS:
            thing.expect(OfSize)
            return self.items_of(thing, line)
        if isinstance(value, torch.Tensor) or not _has_special(value, "__iter__"):
            self.whole((thing,), line)
            return UNKNOWN
        return self.iterated(self.call(self._member_of(type(value), "__iter__", thing, line), [], {}, line), line)

    def unpacked(self, values: Values, count: int, line: Line) -> list[Values]:
        """The items of a row of so many."""
        columns = []
        for thing in values:
            if isinstance(thing, Parts) and len(thing.items) == count and thing.names is None:
                columns.append(list(thing.items))
            elif isinstance(thing, Access) and isinstance(thing.value, ROWS) and len(thing.value) == count:
                thing.expect(OfSize)
                columns.append([(item,) for item in self.items_of(thing, line)])
            else:
                columns.append([self.iterated((thing,), line)] * count)
        return [union(*each) or UNKNOWN for each in zip(*columns, strict=True)] or [UNKNOWN] * count

    def items_for_extension(self, values: Values) -> tuple[Values, ...]:
        """The items that `[*values]` adds."""
        found: list[Values] = []
        for thing in values:
            if isinstance(thing, Parts) and thing.names is None:
                found += thing.items
            else:
                found.append(self.iterated((thing,), ("", 0)))
        return tuple(found)

    # Tests

    def truth(self, values: Values, line: Line) -> tuple[bool, Any]:
        """Whether it is known to be true or false, and which."""
        known, value = plain_value(values)
        if known:
            self.whole(values, line)
            return True, bool(value)
        found = [self._truth(thing, line) for thing in values]
        return found[0] if len(found) == 1 else (False, None)

    def _truth(self, thing: Any, line: Line) -> tuple[bool, Any]:
        if not isinstance(thing, Access):
            return (False, None)
        value = thing.value
        if isinstance(value, (*ROWS, *SETS, *MAPPINGS)):
            thing.expect(OfSize)
            return True, bool(value)
        if is_plain(value) or isinstance(value, torch.Tensor) or is_array(value):
            self.whole((thing,), line)
            return False, None
        for name in ("__bool__", "__len__"):
            if _member(type(value), name)[0] is not None:
                self.call(self.attribute((thing,), name, line), [], {}, line)
                return False, None
        thing.expect(OfType)
        return True, True

    def identical(self, left: Values, right: Values, negated: bool, line: Line) -> Values:
        """What `is` gives."""
        if len(left) != 1 or len(right) != 1:
            for thing in (*left, *right):
                self._by_identity(thing)
            return UNKNOWN
        one, other = left[0], right[0]
        pair = [self._object(one), self._object(other)]
        if any(known is False for known, _ in pair):
            made = any(isinstance(thing, (Parts, Made, Bound, BuiltinMethod)) for thing in (one, other))
            if made and any(plain_value((thing,)) == (True, None) for thing in (one, other)):
                return constant(negated)
            for thing in (one, other):
                self._by_identity(thing)
            return UNKNOWN
        against_none = any(value is None for _, value in pair)
        for thing in (one, other):
            if isinstance(thing, Access) and against_none and not is_plain(thing.value):
                thing.expect(OfType)
            else:
                self._by_identity(thing)
        return constant((pair[0][1] is pair[1][1]) != negated)

    @staticmethod
    def _object(thing: Any) -> tuple[bool, Any]:
        if isinstance(thing, (Access, Constant, Fixed)):
            return True, thing.value
        return False, None

    def _by_identity(self, thing: Any) -> None:
        if isinstance(thing, Access):
            thing.expect(ByValue if is_plain(thing.value) else ByIdentity)

    # What is read as a whole

    def whole(self, values: Values, line: Line) -> None:
        """Compare all that a value is: code that is not followed has it."""
        for thing in values:
            if isinstance(thing, Access):
                self._content(thing, line)
            elif isinstance(thing, Parts):
                for item in thing.items:
                    self.whole(item, line)
            elif isinstance(thing, Made):
                self._run_unknown(thing, line)
            elif isinstance(thing, Bound):
                self.call((thing.function,), [(thing.owner,), *[UNKNOWN] * 8], {}, line)
            elif isinstance(thing, BuiltinMethod):
                self.whole((thing.owner,), line)

    whole_where_kept = whole

    def _content(self, access: Access, line: Line) -> None:
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
            self._module(access, [], {}, line)
        elif isinstance(value, ModuleType):
            self._content_of_namespace(access, line)
        elif isinstance(value, (FunctionType, MethodType, functools.partial)):
            self.call((access,), [UNKNOWN] * 8, {}, line)
        elif (wrapped := wrapped_by(value)) is not None:
            self._content(access.child(Attribute("__wrapped__"), wrapped, line, watched=access.watched), line)
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
        else:
            self._content_of_object(access, line)

    @staticmethod
    def _has_attributes(value: Any) -> bool:
        """Whether an object's attributes are its content: of a class in Python which is no tensor library's own."""
        if is_users_object(value) or isinstance(value, NAMESPACES):
            return True
        module = type(value).__module__
        return module.startswith(("torch.optim", "torch.amp", "torch.distributions")) and hasattr(value, "__dict__")

    def _spend(self, count: int, access: Access, line: Line) -> bool:
        """Whether so many more items can be compared; else it is said that they are not."""
        self._items += count
        if self._items <= ITEMS:
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
                self._content(child, line)

    def _content_of_lookup(self, access: Access, line: Line) -> None:
        if not self._spend(len(access.value), access, line):
            return
        if hasattr(access.value, "keys"):
            access.expect(OfKeys)
        else:
            access.expect(OfSize)
        for child in self.items_of(access, line):
            if isinstance(child, Access):
                self._content(child, line)

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
                    self._content(access.child(Attribute(name), value, line), line)

    def _content_of_object(self, access: Access, line: Line) -> None:
        value = access.value
        access.expect(OfType)
        names = [*_attributes(value), *_slots(value)]
        if not self._spend(len(names), access, line):
            return
        if _attributes(value):
            access.child(Attribute("__dict__"), vars(value), line).expect(OfKeys)
        for name in names:
            if not name.startswith("_spmd") and hasattr(value, name):
                self._content(access.child(Attribute(name), getattr(value, name), line), line)
        for name in _SPECIAL:
            if isinstance(_member(type(value), name)[1], FunctionType):
                self.call(self._member_of(type(value), name, access, line), [UNKNOWN] * 3, {}, line)

    # Calls

    def call(self, callee: Values, args: Sequence[Values], named: dict[str, Values], line: Line) -> Values:
        """What a call gives."""
        return union(*(self._call(thing, list(args), named, line) for thing in callee)) or UNKNOWN

    def call_spread(self, callee: Values, row: Values, named: Values, line: Line) -> Values:
        """What a call with `*row` and `**named` gives."""
        args: list[Values] = list(self.items_for_extension(row)) if row else []
        exact = len(row) == 1 and isinstance(row[0], Parts)
        if not exact and args:
            args = args if len(row) == 1 and len(args) > 1 else args * 8
        keywords: dict[str, Values] = {}
        for thing in named:
            if isinstance(thing, Parts) and thing.names and all(isinstance(n, str) for n in thing.names):
                keywords |= dict(zip(thing.names, thing.items, strict=True))
            elif isinstance(thing, Access) and isinstance(thing.value, dict):
                thing.expect(OfKeys)
                children = [c for c in self.items_of(thing, line) if isinstance(c, Access)]
                keywords |= {
                    c.step.key: (c,) for c in children if isinstance(c.step, Item) and isinstance(c.step.key, str)
                }
            else:
                self.whole((thing,), line)
        return self.call(callee, args, keywords, line)

    def _call(self, thing: Any, args: list[Values], named: dict[str, Values], line: Line) -> Values:
        if isinstance(thing, Access):
            return self._call_object(thing, args, named, line)
        if isinstance(thing, Bound):
            return self._call(thing.function, [(thing.owner,), *args], named, line)
        if isinstance(thing, Made):
            return self._run(thing.code, self._bind(thing.code, args, named, self._made_defaults(thing)), thing.cells,
                             thing.globals, line)  # fmt: skip
        if isinstance(thing, BuiltinMethod):
            return method(self, thing.owner, thing.name, args, named, line)
        if isinstance(thing, Fixed):
            return self._call_builtin(thing.value, args, named, line)
        self._whole_arguments(args, named, line)
        return UNKNOWN

    def _whole_arguments(self, args: Sequence[Values], named: dict[str, Values], line: Line) -> None:
        for values in (*args, *named.values()):
            self.whole(values, line)

    def _call_builtin(self, value: Any, args: list[Values], named: dict[str, Values], line: Line) -> Values:
        with contextlib.suppress(TypeError):
            if value in FUNCTIONS and not named:
                return FUNCTIONS[value](self, args, line)
        self._whole_arguments(args, named, line)
        return UNKNOWN

    def _call_object(self, access: Access, args: list[Values], named: dict[str, Values], line: Line) -> Values:
        value = access.value
        if isinstance(value, FunctionType):
            return self._call_function(access, args, named, line)
        if isinstance(value, MethodType):
            function = access.child(Attribute("__func__"), value.__func__, line, watched=access.watched)
            owner = access.child(Attribute("__self__"), value.__self__, line, watched=access.watched)
            return self._call(function, [(owner,), *args], named, line)
        if isinstance(value, functools.partial):
            return self._call_partial(access, args, named, line)
        if isinstance(value, nn.Module):
            return self._module(access, args, named, line)
        if isinstance(value, type):
            return self._construct(access, args, named, line)
        if (wrapped := wrapped_by(value)) is not None:
            inner = access.child(Attribute("__wrapped__"), wrapped, line, watched=access.watched)
            return self._call(inner, args, named, line)
        if is_users_object(value) and isinstance(_member(type(value), "__call__")[1], FunctionType):
            return self.call(self._member_of(type(value), "__call__", access, line), args, named, line)
        if not isinstance(value, torch.Tensor):
            access.expect(ByIdentity)
        return self._call_builtin(value, args, named, line)

    def _call_partial(self, access: Access, args: list[Values], named: dict[str, Values], line: Line) -> Values:
        value = access.value
        function = access.child(Attribute("func"), value.func, line, watched=access.watched)
        row = access.child(Attribute("args"), value.args, line)
        table = access.child(Attribute("keywords"), value.keywords, line)
        first = [(row.child(Item(n), item, line),) for n, item in enumerate(value.args)]
        extra = {name: (table.child(Item(name), item, line),) for name, item in value.keywords.items()}
        return self._call(function, [*first, *args], {**extra, **named}, line)

    def _construct(self, access: Access, args: list[Values], named: dict[str, Values], line: Line) -> Values:
        access.expect(ByIdentity)
        if access.value in FUNCTIONS and not named:
            return FUNCTIONS[access.value](self, args, line)
        if is_own(access.value) and isinstance(_member(access.value, "__init__")[1], FunctionType):
            self.call(self._member_of(access.value, "__init__", access, line), [UNKNOWN, *args], named, line)
        self._whole_arguments(args, named, line)
        return UNKNOWN

    def _call_function(self, access: Access, args: list[Values], named: dict[str, Values], line: Line) -> Values:
        function: FunctionType = access.value
        file = function.__code__.co_filename
        own = is_own_code(file)
        known = any(isinstance(t, Access) and not isinstance(t.value, torch.Tensor) for v in args for t in v)
        if not own and not (known and is_library_code(file)):
            access.expect(ByIdentity)
            if function in FUNCTIONS and not named:
                return FUNCTIONS[function](self, args, line)
            if (function.__module__, function.__name__) in HOST_CALLS:  # the program calls it, and not the trace
                for thing in args[0] if args else ():
                    self._by_identity(thing)
                args = args[1:]
            self._whole_arguments(args, named, line)
            if wrapped_by(function) is not None:
                self._content(access.child(Attribute("__wrapped__"), wrapped_by(function), line, watched=False), line)
            return UNKNOWN
        access.expect(OfFunction)
        cells = self._cells(access, function, line)
        defaults = self._defaults(access, function, line)
        names = self.root(function.__globals__, "", line, watched=own)
        return self._run(function.__code__, self._bind(function.__code__, args, named, defaults), cells, names, line)

    def _cells(self, access: Access, function: FunctionType, line: Line) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, (name, cell) in enumerate(
            zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        ):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if access.parent is None:  # the cell itself stays what it is
                holder = self.root(cell, "", line)
                found[name] = holder.child(Attribute("cell_contents"), value, line)
                found[name].label = name
            else:
                found[name] = access.child(Closure(number, name), value, line)
        return found

    def _defaults(self, access: Access, function: FunctionType, line: Line) -> dict[str, Values]:
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        found: dict[str, Values] = {}
        if function.__defaults__:
            row = access.child(Attribute("__defaults__"), function.__defaults__, line)
            count = len(function.__defaults__)
            for n, name in enumerate(names[-count:]):
                found[name] = (row.child(Item(n), function.__defaults__[n], line),)
                found[name][0].label = name
        if function.__kwdefaults__:
            table = access.child(Attribute("__kwdefaults__"), function.__kwdefaults__, line)
            found |= {n: (table.child(Item(n), x, line),) for n, x in function.__kwdefaults__.items()}
        return found

    def _made_defaults(self, made: Made) -> dict[str, Values]:
        names = made.code.co_varnames[: made.code.co_argcount]
        row = next((t for t in made.defaults if isinstance(t, Parts)), None)
        found = dict(zip(names[-len(row.items) :], row.items, strict=True)) if row and row.items else {}
        table = next((t for t in made.keyword_defaults if isinstance(t, Parts) and t.names), None)
        return found | (dict(zip(table.names, table.items, strict=True)) if table and table.names else {})

    @staticmethod
    def _bind(
        code: Any, args: Sequence[Values], named: dict[str, Values], defaults: dict[str, Values]
    ) -> dict[str, Values]:
        """What the parameters of a call are."""
        count = code.co_argcount
        names = code.co_varnames[: count + code.co_kwonlyargcount]
        local = dict.fromkeys(names, UNKNOWN) | defaults
        local |= dict(zip(names[:count], args, strict=False))
        local |= {name: values for name, values in named.items() if name in names}
        place = count + code.co_kwonlyargcount
        if code.co_flags & 4:
            local[code.co_varnames[place]] = (Parts(tuple(args[count:])),)
            place += 1
        if code.co_flags & 8:
            rest = {name: values for name, values in named.items() if name not in names}
            local[code.co_varnames[place]] = (Parts(tuple(rest.values()), tuple(rest)),)
        return local

    def _run_unknown(self, made: Made, line: Line) -> None:
        local = self._bind(made.code, [], {}, {}) | self._made_defaults(made)
        if made.code.co_varnames[:1] == (".0",):
            local[".0"] = UNKNOWN
        self._run(made.code, local, made.cells, made.globals, line)

    def _run(self, code: Any, local: dict[str, Values], cells: Any, names: Access, line: Line) -> Values:
        key = code, tuple(local.items()), tuple(id(c) if not isinstance(c, tuple) else id(c[0]) for c in cells.values())
        if key in self._running:
            return self._running[key]
        if self._depth >= _DEPTH:
            self._whole_arguments(list(local.values()), {}, line)
            return UNKNOWN
        self._running[key] = UNKNOWN
        self._depth += 1
        try:
            result = Frame(self, code, local, cells, names, line).run()
        finally:
            self._depth -= 1
        if code.co_flags & 0x20:  # a generator
            result = (Parts((result,)),)
        self._running[key] = result
        return result

    def _module(self, access: Access, args: list[Values], named: dict[str, Values], line: Line) -> Values:
        """A call of a module: its hooks, and the `forward`s of all of its own classes."""
        if not access.covered:
            access.expect(OfModule)
        result: Values = UNKNOWN
        self._whole_arguments(args, named, line)
        for owner in access.value.modules():
            if id(owner) in self._modules:
                continue
            self._modules.add(id(owner))
            kind: Any = type(owner)
            inner = access
            if owner is not access.value:
                inner = self.root(owner, access.label, line, watched=False, covered=True)
            for name in _HOOKS:
                for hook in vars(owner)[name].values():
                    self.whole((self.root(hook, "a hook", line),), line)
            if "forward" in vars(owner):
                self.whole((inner.child(Attribute("forward"), vars(owner)["forward"], line, watched=False),), line)
            elif is_own(kind):
                forward = self._member_of(kind, "forward", inner, line)
                if owner is access.value:
                    result = self.call(forward, args, named, line)
                else:
                    self.call(forward, [], {}, line)
        return result

    # Writes

    def writes(self, thing: Any, kind: str, name: Any, line: Line) -> None:
        """A write to an attribute or an item, or to any item where the name is not known."""
        if isinstance(thing, Access):
            step: Step | None = None
            if name is not None:
                step = Attribute(name) if kind == "attribute" else Item(name)
            self.written.append((thing, step, line))

    def writes_cell(self, cell: Any, line: Line) -> None:
        """A write to a variable of an enclosing function."""
        if isinstance(cell, Access) and cell.parent is not None:
            self.written.append((cell.parent, cell.step, line))


class TooMuch(Exception):
    """A function is too long to be followed to its end."""

    def __init__(self, line: Line) -> None:
        super().__init__(line)
        self.line = line


def has_items(value: Any) -> bool:
    """Whether a container gives its items by place or key, without a method in Python of its own."""
    if isinstance(value, LOOKUPS):
        return type(value) in LOOKUPS
    return isinstance(value, (*ROWS, *MAPPINGS)) and not _has_special(value, "__getitem__")


def _has_special(value: Any, name: str) -> bool:
    return isinstance(_member(type(value), name)[1], FunctionType)


def _member(kind: type, name: str, after: Any = None) -> tuple[type | None, Any]:
    """The class that has a name, in the order in which they are looked at, and what it has."""
    order = kind.__mro__
    if after in order:
        order = order[order.index(after) + 1 :]
    for base in order:
        if name in vars(base):
            return base, vars(base)[name]
    return None, None


def _attributes(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _slots(value: Any) -> list[str]:
    return sorted(
        {n for kind in type(value).__mro__ for n, x in vars(kind).items() if isinstance(x, MemberDescriptorType)}
    )
