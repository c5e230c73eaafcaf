"""Items of containers, iteration, and tests of what is there."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import nn

from spmd.api.guards.access import Access, Item, Line, Step
from spmd.api.guards.checks import (
    ByIdentity,
    ByValue,
    IsThere,
    OfKeys,
    OfModule,
    OfSize,
    OfType,
)
from spmd.api.guards.following import Following
from spmd.api.guards.kinds import (
    LOOKUPS,
    MAPPINGS,
    ROWS,
    SETS,
    is_array,
    is_plain,
)
from spmd.api.guards.limits import ITEMS
from spmd.api.guards.members import has_items, has_special, member
from spmd.api.guards.things import (
    UNKNOWN,
    Bound,
    BuiltinMethod,
    Constant,
    Fixed,
    Made,
    Parts,
    Values,
    constant,
    plain_value,
    union,
)


class Items(Following):
    """Follows items, and decides tests that follow from what is read."""

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
            exact = (
                thing.exact and thing.names is None and type(key) is int and -len(thing.items) <= key < len(thing.items)
            )
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
        _, special = member(type(thing.value), "__getitem__")
        if isinstance(special, FunctionType) and not isinstance(thing.value, (type, torch.Tensor)):
            return self.call(self.member_of(type(thing.value), "__getitem__", thing, line), [key], {}, line)
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
        """The result of a mapping's `get`."""
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
        """Test for a key or an item of a container."""
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
            special = member(type(thing.value), "__contains__")[1] if isinstance(thing, Access) else None
            if isinstance(special, FunctionType):
                self.call(self.member_of(type(thing.value), "__contains__", thing, line), [key], {}, line)
            else:
                self.whole((thing,), line)
        return UNKNOWN

    def iterated(self, values: Values, line: Line) -> Values:
        """The result of iteration: any of the items."""
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
            return tuple(self.inner(thing, name, inner, line) for name, inner in value._modules.items()) or UNKNOWN
        if isinstance(value, MAPPINGS) and len(value) <= ITEMS:
            thing.expect(OfKeys)
            return union(*(constant(key) if is_plain(key) else UNKNOWN for key in value))
        if isinstance(value, ROWS) and len(value) <= ITEMS:
            thing.expect(OfSize)
            return self.items_of(thing, line)
        if isinstance(value, torch.Tensor) or not has_special(value, "__iter__"):
            self.whole((thing,), line)
            return UNKNOWN
        return self.iterated(self.call(self.member_of(type(value), "__iter__", thing, line), [], {}, line), line)

    def unpacked(self, values: Values, count: int, line: Line) -> list[Values]:
        """The items of a row of so many."""
        columns = []
        for thing in values:
            if isinstance(thing, Parts) and len(thing.items) == count and thing.exact and thing.names is None:
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

    def truth(self, values: Values, line: Line) -> tuple[bool, Any]:
        """The truth of a value, where it is known."""
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
            if member(type(value), name)[0] is not None:
                self.call(self.attribute((thing,), name, line), [], {}, line)
                return False, None
        thing.expect(OfType)
        return True, True

    def identical(self, left: Values, right: Values, negated: bool, line: Line) -> Values:
        """The result of `is`."""
        if len(left) != 1 or len(right) != 1:
            for thing in (*left, *right):
                self.by_identity(thing)
            return UNKNOWN
        one, other = left[0], right[0]
        pair = [self._object(one), self._object(other)]
        if any(known is False for known, _ in pair):
            made = any(isinstance(thing, (Parts, Made, Bound, BuiltinMethod)) for thing in (one, other))
            if made and any(plain_value((thing,)) == (True, None) for thing in (one, other)):
                return constant(negated)
            for thing in (one, other):
                self.by_identity(thing)
            return UNKNOWN
        against_none = any(value is None for _, value in pair)
        for thing in (one, other):
            if isinstance(thing, Access) and against_none and not is_plain(thing.value):
                thing.expect(OfType)
            else:
                self.by_identity(thing)
        return constant((pair[0][1] is pair[1][1]) != negated)

    @staticmethod
    def _object(thing: Any) -> tuple[bool, Any]:
        if isinstance(thing, (Access, Constant, Fixed)):
            return True, thing.value
        return False, None

    def by_identity(self, thing: Any) -> None:
        if isinstance(thing, Access):
            thing.expect(ByValue if is_plain(thing.value) else ByIdentity)
