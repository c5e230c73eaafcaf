"""Instructions that read names, attributes and items, and that make values."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import CodeType
from typing import Any

from spmd.api.guards.instructions import Instruction
from spmd.api.guards.kinds import is_plain
from spmd.api.guards.limits import LENGTH
from spmd.api.guards.stack_frame import StackFrame
from spmd.api.guards.things import NULL, UNKNOWN, Fixed, Parts, Values, constant, plain_value, union

_BINARY = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip


class ValueInstructions(StackFrame):
    """Names, attributes, items, operators, rows and mappings."""

    def _load_const(self, each: Instruction) -> None:
        self._push((Fixed(each.value),) if isinstance(each.value, CodeType) else self.reader.constant(each.value))

    _load_small_int = _load_const

    def _fast(self, each: Instruction) -> None:
        names = each.value if isinstance(each.value, tuple) else (each.value,)
        kinds = [part for part in each.name.split("_") if part in ("LOAD", "STORE")] or ["LOAD"]
        for kind, name in zip(kinds if len(kinds) == len(names) else kinds * len(names), names, strict=False):
            if kind == "LOAD":
                self._push(self._local(name))
            else:
                self._set(name, self._pop())

    def _local(self, name: str) -> Values:
        if name in self.own_cells:
            return union(self.own_cells[name], self.local.get(name, ())) or UNKNOWN
        return self.local.get(name) or UNKNOWN

    def _set(self, name: str, values: Values) -> None:
        self.local[name] = values
        self._stored[name] = union(self._stored.get(name, ()), values)

    def _delete_fast(self, each: Instruction) -> None:
        self.local.pop(each.value, None)

    def _load_global(self, each: Instruction) -> None:
        found = self.reader.name(self.globals, each.value, self.line)
        # Before Python 3.13 a null below the function, from then on above it.
        if each.effect == 2:
            self._push(NULL)
        self._push(found)

    _load_name = _load_global

    def _load_from_dict_or_globals(self, each: Instruction) -> None:
        self._pop()
        self._push(self.reader.name(self.globals, each.value, self.line))

    def _load_deref(self, each: Instruction) -> None:
        name = each.value
        if name in self.own_cells:
            self._push(union(self.own_cells[name], self.local.get(name, ())) or UNKNOWN)
        else:
            self._push(self.reader.cell(self.cells.get(name), self.line) or UNKNOWN)

    _load_classderef = _load_from_dict_or_deref = _load_deref

    def _load_closure(self, each: Instruction) -> None:
        self._push((Fixed(each.value),))

    def _store_deref(self, each: Instruction) -> None:
        values = self._pop()
        if each.value in self.own_cells:
            old = self.own_cells[each.value]
            self.own_cells[each.value] = union(old, values)
            self._grown |= self.own_cells[each.value] != old
        else:
            self.reader.writes_cell(self.cells.get(each.value), self.line)

    def _store_global(self, each: Instruction) -> None:
        self._pop()
        self.reader.writes(self.globals, "item", each.value, self.line)

    def _store_name(self, each: Instruction) -> None:
        self._pop()

    def _import_name(self, each: Instruction) -> None:
        self._pop_many(2)
        self._push(self.reader.imported(each.value))

    def _import_from(self, each: Instruction) -> None:
        self._push(self.reader.attribute(self.stack[-1] if self.stack else UNKNOWN, each.value, self.line))

    # Attributes and items

    def _load_attr(self, each: Instruction) -> None:
        found = self.reader.attribute(self._pop(), each.value, self.line)
        if each.effect == 1:  # the form for calls, from Python 3.12 on
            self._push(NULL)
        self._push(found)

    def _load_method(self, each: Instruction) -> None:
        found = self.reader.attribute(self._pop(), each.value, self.line)
        self.stack += [NULL, found]

    def _load_super_attr(self, each: Instruction) -> None:
        _, kind, owner = self._pop_many(3)
        found = self.reader.attribute(self.reader.super_of(kind, owner), each.value, self.line)
        if each.arg & 1:
            self._push(NULL)
        self._push(found)

    def _store_attr(self, each: Instruction) -> None:
        owner, values = self._pop(), self._pop()
        self.reader.whole_where_kept(values, self.line)
        for thing in owner:
            self.reader.writes(thing, "attribute", each.value, self.line)

    def _delete_attr(self, each: Instruction) -> None:
        for thing in self._pop():
            self.reader.writes(thing, "attribute", each.value, self.line)

    def _store_subscr(self, each: Instruction) -> None:
        key, owner, values = self._pop(), self._pop(), self._pop()
        self.reader.whole(key, self.line)
        self.reader.whole_where_kept(values, self.line)
        known, name = plain_value(key)
        for thing in owner:
            if isinstance(thing, Parts):
                self._grown |= thing.extend((values,))
            self.reader.writes(thing, "item", name if known else None, self.line)

    def _binary_subscr(self, each: Instruction) -> None:
        key, owner = self._pop(), self._pop()
        self._push(self.reader.item(owner, key, self.line))

    def _binary_op(self, each: Instruction) -> None:
        symbol = getattr(each, "symbol", None) or _symbols().get(each.arg, "?")
        if symbol == "[]":
            self._binary_subscr(each)
        else:
            self._binary(symbol.removesuffix("=") if symbol not in ("==", "<=", ">=") else symbol)

    def _binary(self, symbol: str) -> None:
        right, left = self._pop(), self._pop()
        self._push(self._compute(symbol, left, right))

    def _compare_op(self, each: Instruction) -> None:
        right, left = self._pop(), self._pop()
        self._push(self._compute(str(each.value).removeprefix("bool(").removesuffix(")"), left, right))

    def _compute(self, symbol: str, left: Values, right: Values) -> Values:
        for values in (left, right):
            self.reader.whole(values, self.line)
        (known, one), (known_too, other) = plain_value(left), plain_value(right)
        if not (known and known_too and symbol in _BINARY) or _is_long(one) or _is_long(other):
            return UNKNOWN
        if symbol in "*%" and isinstance(one, (str, bytes)) and symbol == "*":
            return UNKNOWN
        try:
            result = _BINARY[symbol](one, other)
        except Exception:
            return UNKNOWN
        return constant(result) if is_plain(result) else UNKNOWN

    def _is_op(self, each: Instruction) -> None:
        right, left = self._pop(), self._pop()
        self._push(self.reader.identical(left, right, bool(each.arg), self.line))

    def _contains_op(self, each: Instruction) -> None:
        owner, key = self._pop(), self._pop()
        self._push(self.reader.contains(owner, key, bool(each.arg), self.line))

    def _unary_not(self, each: Instruction) -> None:
        known, value = self.reader.truth(self._pop(), self.line)
        self._push(constant(not value) if known else UNKNOWN)

    def _to_bool(self, each: Instruction) -> None:
        known, value = self.reader.truth(self._pop(), self.line)
        self._push(constant(bool(value)) if known else UNKNOWN)

    def _unary_negative(self, each: Instruction) -> None:
        values = self._pop()
        self.reader.whole(values, self.line)
        known, value = plain_value(values)
        self._push(constant(-value) if known and isinstance(value, (int, float)) else UNKNOWN)

    # Rows and mappings that the code makes

    def _build_tuple(self, each: Instruction) -> None:
        self._push(self.reader.row(self._pop_many(each.arg)))

    def _build_list(self, each: Instruction) -> None:
        self._push(self.reader.row(self._pop_many(each.arg), site=(self, each.offset)))

    def _build_map(self, each: Instruction) -> None:
        pairs = self._pop_many(2 * each.arg)
        keys = [plain_value(key) for key in pairs[::2]]
        names = tuple(key for _, key in keys) if all(known for known, _ in keys) else None
        self._push(self.reader.row(pairs[1::2], names, site=(self, each.offset)))

    def _build_const_key_map(self, each: Instruction) -> None:
        (names,) = self._pop() or (None,)
        values = self._pop_many(each.arg)
        found = tuple(plain_value(x)[1] for x in names.items) if isinstance(names, Parts) else None
        self._push(self.reader.row(values, found, site=(self, each.offset)))

    def _add_to(self, each: Instruction) -> None:
        values = self._pop_many(2 if each.name == "MAP_ADD" else 1)
        place = len(self.stack) - each.arg
        if not 0 <= place < len(self.stack):
            return
        is_item = each.name.endswith(("APPEND", "ADD"))
        for row in (thing for thing in self.stack[place] if isinstance(thing, Parts)):
            if not is_item and not row.items and len(values[-1]) == 1 and isinstance(values[-1][0], Parts):
                row.items, row.names, row.exact = values[-1][0].items, values[-1][0].names, values[-1][0].exact
            else:
                self._grown |= row.extend((values[-1],) if is_item else self.reader.items_for_extension(values[-1]))

    _list_append = _set_add = _map_add = _add_to
    _list_extend = _set_update = _dict_update = _dict_merge = _add_to

    def _list_to_tuple(self, each: Instruction) -> None: ...

    def _build_slice(self, each: Instruction) -> None:
        for values in self._pop_many(each.arg):
            self.reader.whole(values, self.line)
        self._push(UNKNOWN)

    def _binary_slice(self, each: Instruction) -> None:
        owner, *ends = self._pop_many(3)
        for end in ends:
            self.reader.whole(end, self.line)
        self._push(self.reader.item(owner, UNKNOWN, self.line))

    def _format_value(self, each: Instruction) -> None:
        width = self._pop() if each.arg & 4 else ()
        values = self._pop()
        self.reader.whole(width, self.line)
        self.reader.whole(values, self.line)
        known, value = plain_value(values)
        self._push(constant(f"{value}") if known and not each.arg else UNKNOWN)

    def _format_simple(self, each: Instruction) -> None:
        values = self._pop()
        self.reader.whole(values, self.line)
        known, value = plain_value(values)
        self._push(constant(f"{value}") if known else UNKNOWN)

    def _build_string(self, each: Instruction) -> None:
        parts = [plain_value(values) for values in self._pop_many(each.arg)]
        if all(known and isinstance(value, str) for known, value in parts):
            self._push(constant("".join(value for _, value in parts)))
        else:
            self._push(UNKNOWN)

    def _unpack_sequence(self, each: Instruction) -> None:
        found = self.reader.unpacked(self._pop(), each.arg, self.line)
        self.stack += reversed(found)

    def _unpack_ex(self, each: Instruction) -> None:
        values = self._pop()
        items = self.reader.iterated(values, self.line)
        self.stack += [items] * ((each.arg & 0xFF) + 1 + (each.arg >> 8))


def _symbols() -> Mapping[int, str]:
    import dis

    return {number: symbol for number, (_, symbol) in enumerate(getattr(dis, "_nb_ops", ()))}


def _is_long(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return len(value) > LENGTH
    return isinstance(value, int) and value.bit_length() > 256
