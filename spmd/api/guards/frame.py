"""Runs the bytecode of a function over what its variables may be, without running the function."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any

from spmd.api.guards.access import Access, Line
from spmd.api.guards.instructions import Instruction, handlers_of, instructions_of
from spmd.api.guards.kinds import is_own_code, is_plain
from spmd.api.guards.things import NULL, UNKNOWN, Fixed, Made, Parts, Values, constant, plain_value, union

if TYPE_CHECKING:
    from spmd.api.guards.reader import Reader

_PASSES = 4  # over a loop: what its variables may be grows from one to the next
_LONG = 10_000  # the most characters or digits of a value that is computed here

_BINARY = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip
_OLD_BINARY = {"BINARY_ADD": "+", "BINARY_SUBTRACT": "-", "BINARY_MULTIPLY": "*", "BINARY_MODULO": "%"}
_PUSHES_ONE = ("LOAD_BUILD_CLASS", "LOAD_ASSERTION_ERROR", "LOAD_LOCALS", "LOAD_COMMON_CONSTANT")


class Frame:
    """One call of a function.

    Args:
        reader: what follows names, attributes, items and calls.
        code: its code.
        local: what its parameters are.
        cells: what the variables that it closes over are, by name.
        names: the namespace of its globals.
        line: the line of the call, where the code is not the user's own.
    """

    def __init__(
        self,
        reader: Reader,
        code: CodeType,
        local: Mapping[str, Values],
        cells: Mapping[str, Any],
        names: Access,
        line: Line,
    ) -> None:
        self.reader, self.code, self.cells, self.globals = reader, code, dict(cells), names
        self._called_at = line
        self._is_own = is_own_code(code.co_filename)
        self.stack: list[Values] = []
        self.local: dict[str, Values] = dict(local)
        self.own_cells = {name: local.get(name, ()) for name in code.co_cellvars}
        self.result: Values = ()
        self._pending: dict[int, tuple[list[Values], dict[str, Values]]] = {}
        self._grown = False
        self._keywords: tuple[str, ...] = ()

    def run(self) -> Values:
        """What the function returns."""
        instructions = instructions_of(self.code)
        handlers = handlers_of(self.code)
        for _ in range(_PASSES):
            self._grown, alive = False, True
            self.stack, start = [], dict(self.local)
            for each in instructions:
                state = self._pending.get(each.offset)
                if each.offset in handlers and state is None:
                    state = [UNKNOWN] * handlers[each.offset], self._every_local(start)
                if not alive and state is None:
                    continue
                if state is not None:
                    self._enter(state, alive)
                alive = self._do(each)
                if each.offset in handlers or not alive:
                    start |= self.local
            self.local = start if not self._grown else {**start}
            if not self._grown:
                break
        return self.result or UNKNOWN

    def _every_local(self, start: Mapping[str, Values]) -> dict[str, Values]:
        names = {*start, *self.local}
        return {name: union(start.get(name, ()), self.local.get(name, ())) for name in names}

    @property
    def line(self) -> Line:
        """The user's line that is being read."""
        return (self.code.co_filename, self._line) if self._is_own else self._called_at

    def _enter(self, state: tuple[list[Values], dict[str, Values]], alive: bool) -> None:
        stack, local = state
        if not alive:
            self.stack, self.local = list(stack), dict(local)
            return
        if len(stack) == len(self.stack):
            self.stack = [union(*each) for each in zip(stack, self.stack, strict=True)]
        for name, values in local.items():
            self.local[name] = union(values, self.local.get(name, ()))

    def _jump(self, target: int | None, stack: list[Values] | None = None) -> None:
        """Let the instruction at the target begin with what is known here, too."""
        stack = self.stack if stack is None else stack
        found = self._pending.get(target)  # type: ignore[arg-type]
        if found is None:
            self._pending[target] = list(stack), dict(self.local)  # type: ignore[index]
            self._grown = True
            return
        old_stack, old_local = found
        if len(old_stack) == len(stack):
            joined = [union(*each) for each in zip(old_stack, stack, strict=True)]
        else:
            joined = old_stack
        local = {n: union(old_local.get(n, ()), self.local.get(n, ())) for n in {*old_local, *self.local}}
        if joined != old_stack or local != old_local:
            self._grown = True
            self._pending[target] = joined, local  # type: ignore[index]

    # The instructions. Each returns whether the next one is reached.

    def _do(self, each: Instruction) -> bool:
        self._line = each.line
        self.reader.count(self.line)
        method: Callable[[Instruction], bool | None] | None = getattr(self, f"_{each.name.lower()}", None)
        if method is not None:
            return method(each) is not False
        if each.target is not None:
            return self._branch(each)
        if each.name.startswith(("RETURN", "RERAISE", "RAISE", "INTERPRETER_EXIT")):
            return self._leave(each)
        if each.name.startswith(("LOAD_FAST", "STORE_FAST")):
            self._fast(each)
        elif each.name.startswith(("CALL", "PRECALL")):
            self._call_by_count(each)
        elif each.name in _OLD_BINARY or each.name.startswith("INPLACE_"):
            self._binary(_OLD_BINARY.get(each.name, "?"))
        else:
            self._generic(each)
        return True

    def _generic(self, each: Instruction) -> None:
        """An instruction whose operands are read whole, and of whose results nothing is known."""
        if each.name in _PUSHES_ONE or each.effect > 0:
            self.stack += [UNKNOWN] * each.effect
            return
        for values in self._pop_many(1 - each.effect):
            self.reader.whole(values, self.line)
        self.stack.append(UNKNOWN)

    def _pop(self) -> Values:
        return self.stack.pop() if self.stack else UNKNOWN

    def _pop_many(self, count: int) -> list[Values]:
        return [self._pop() for _ in range(count)][::-1]

    def _push(self, values: Values) -> None:
        self.stack.append(values)

    def _leave(self, each: Instruction) -> bool:
        if each.name == "RETURN_CONST":
            self.result = union(self.result, constant(each.value))
        elif each.name in ("RETURN_VALUE", "RETURN_GENERATOR") and each.name != "RETURN_GENERATOR":
            self.result = union(self.result, self._pop())
        elif each.name == "RETURN_GENERATOR":
            self._push(UNKNOWN)
            return True
        return False

    def _nop(self, each: Instruction) -> None: ...

    _resume = _cache = _make_cell = _copy_free_vars = _gen_start = _extended_arg = _not_taken = _nop
    _setup_annotations = _pop_block = _pop_except = _nop

    def _pop_except(self, each: Instruction) -> None:  # type: ignore[no-redef]
        for _ in range(-each.effect):
            self._pop()

    _pop_top = _pop_iter = _pop_except

    def _push_null(self, each: Instruction) -> None:
        self._push(NULL)

    def _push_exc_info(self, each: Instruction) -> None:
        self.stack += [UNKNOWN]

    def _end_for(self, each: Instruction) -> None:
        for _ in range(-each.effect):
            self._pop()

    def _copy(self, each: Instruction) -> None:
        self._push(self.stack[-each.arg] if each.arg <= len(self.stack) else UNKNOWN)

    def _swap(self, each: Instruction) -> None:
        if each.arg <= len(self.stack):
            self.stack[-1], self.stack[-each.arg] = self.stack[-each.arg], self.stack[-1]

    def _dup_top(self, each: Instruction) -> None:
        self._push(self.stack[-1] if self.stack else UNKNOWN)

    def _dup_top_two(self, each: Instruction) -> None:
        self.stack += self.stack[-2:]

    def _rot(self, count: int) -> None:
        if len(self.stack) >= count:
            self.stack.insert(len(self.stack) - count, self.stack.pop())

    def _rot_two(self, each: Instruction) -> None:
        self._rot(2)

    def _rot_three(self, each: Instruction) -> None:
        self._rot(3)

    def _rot_four(self, each: Instruction) -> None:
        self._rot(4)

    def _rot_n(self, each: Instruction) -> None:
        self._rot(each.arg)

    # Names

    def _load_const(self, each: Instruction) -> None:
        self._push((Fixed(each.value),) if isinstance(each.value, CodeType) else constant(each.value))

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
        self._push((Parts(tuple(self._pop_many(each.arg))),))

    _build_list = _build_tuple

    def _build_map(self, each: Instruction) -> None:
        pairs = self._pop_many(2 * each.arg)
        keys = [plain_value(key) for key in pairs[::2]]
        names = tuple(key for _, key in keys) if all(known for known, _ in keys) else None
        self._push((Parts(tuple(pairs[1::2]), names),))

    def _build_const_key_map(self, each: Instruction) -> None:
        (names,) = self._pop() or (None,)
        values = self._pop_many(each.arg)
        found = tuple(plain_value(x)[1] for x in names.items) if isinstance(names, Parts) else None
        self._push((Parts(tuple(values), found),))

    def _add_to(self, each: Instruction) -> None:
        values = self._pop_many(2 if each.name == "MAP_ADD" else 1)
        place = len(self.stack) - each.arg
        if 0 <= place < len(self.stack):
            added = self.reader.items_for_extension(values[-1]) if "APPEND" not in each.name else (values[-1],)
            self.stack[place] = self._with(self.stack[place], added)

    _list_append = _set_add = _map_add = _add_to
    _list_extend = _set_update = _dict_update = _dict_merge = _add_to

    @staticmethod
    def _with(values: Values, added: tuple[Values, ...]) -> Values:
        """Rows that the code makes, with more items: each only once, as loops add."""
        parts = [thing for thing in values if isinstance(thing, Parts)]
        items = tuple(dict.fromkeys((*(item for part in parts for item in part.items), *added)))
        return (
            (Parts(items, None if len(items) > 1 else ()),)
            if items != tuple(i for p in parts for i in p.items)
            else values
        )

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

    # Branches and loops

    def _get_iter(self, each: Instruction) -> None:
        self._push((Parts((self.reader.iterated(self._pop(), self.line),)),))

    _get_yield_from_iter = _get_iter

    def _for_iter(self, each: Instruction) -> None:
        iterator = self.stack[-1] if self.stack else UNKNOWN
        # Before Python 3.12 the iterator is gone at the target.
        ends = instructions_at(self.code, each.target)
        keeps = ends is not None and ends.name == "END_FOR"
        self._jump(each.target, [*self.stack, UNKNOWN] if keeps else self.stack[:-1])
        self._push(union(*(i for thing in iterator if isinstance(thing, Parts) for i in thing.items[:1])) or UNKNOWN)

    def _yield_value(self, each: Instruction) -> None:
        self.result = union(self.result, self._pop())
        self._push(UNKNOWN)

    def _branch(self, each: Instruction) -> bool:
        name = each.name
        if "IF" not in name:  # JUMP_FORWARD, SETUP_FINALLY, and the like
            if name.startswith("SETUP"):
                self._jump(each.target, [*self.stack, *[UNKNOWN] * 6])
                return True
            if name == "SEND":
                self._jump(each.target)
                return True
            self._jump(each.target)
            return False
        values = self._pop()
        if name.endswith("EXC_MATCH") or "NOT_EXC_MATCH" in name:
            self._pop()
        keeps = [*self.stack, values] if "OR_POP" in name else self.stack
        taken = self._outcome(name, values)
        if taken is not False:
            self._jump(each.target, keeps)
        return taken is not True

    def _outcome(self, name: str, values: Values) -> bool | None:
        """Whether a conditional jump is taken, where that follows from what is read."""
        if "NONE" in name:
            same = self.reader.identical(values, constant(None), False, self.line)
            known, value = plain_value(same)
            return (value if "NOT_NONE" not in name else not value) if known else None
        known, value = self.reader.truth(values, self.line)
        return (bool(value) == ("TRUE" in name)) if known else None

    # Functions

    def _make_function(self, each: Instruction) -> None:
        from_stack = self._pop_many(1 + (each.effect == -1 and each.name == "MAKE_FUNCTION" and _names_functions()))
        code = next(
            (t.value for v in from_stack for t in v if isinstance(t, Fixed) and isinstance(t.value, CodeType)), None
        )
        flags = each.arg or 0
        closure = self._pop() if flags & 8 else ()
        if flags & 4:
            self._pop()
        keyword_defaults = self._pop() if flags & 2 else ()
        defaults = self._pop() if flags & 1 else ()
        self._push(UNKNOWN if code is None else (self._made(code, defaults, keyword_defaults, closure),))

    def _made(self, code: CodeType, defaults: Values, keyword_defaults: Values, closure: Values) -> Made:
        cells = {name: (self, name) if name in self.own_cells else self.cells.get(name) for name in code.co_freevars}
        return self.reader.made(Made(code, defaults, keyword_defaults, cells, self.globals))

    def _set_function_attribute(self, each: Instruction) -> None:
        function, values = self._pop(), self._pop()
        made = function[0] if function and isinstance(function[0], Made) else None
        if made is not None and each.arg in (1, 2):
            parts = (values, made.keyword_defaults) if each.arg == 1 else (made.defaults, values)
            function = (self.reader.made(Made(made.code, *parts, made.cells, made.globals)),)
        self._push(function)

    def _kw_names(self, each: Instruction) -> None:
        names = each.value if isinstance(each.value, tuple) else self.code.co_consts[each.arg]
        self._keywords = names

    def _precall(self, each: Instruction) -> None: ...

    def _call(self, each: Instruction) -> None:
        keywords, self._keywords = self._keywords, ()
        self._finish_call(each.arg, keywords, below=2)

    def _call_kw(self, each: Instruction) -> None:
        self._finish_call(each.arg, _texts(self._pop()), below=2)

    def _call_function(self, each: Instruction) -> None:
        self._finish_call(each.arg, (), below=1)

    def _call_method(self, each: Instruction) -> None:
        self._finish_call(each.arg, (), below=2)

    def _call_function_kw(self, each: Instruction) -> None:
        self._finish_call(each.arg, _texts(self._pop()), below=1)

    def _finish_call(self, count: int, keywords: tuple[str, ...], *, below: int) -> None:
        args = self._pop_many(count)
        slots = [values for values in self._pop_many(below) if values is not NULL]
        callee = slots[0] if slots else UNKNOWN
        args = [*slots[1:], *args]  # the iterator of a comprehension
        if self._is_super(callee) and not args:
            self._push(self._super())
            return
        positional = args[: len(args) - len(keywords)]
        named = dict(zip(keywords, args[len(positional) :], strict=True))
        self._push(self.reader.call(callee, positional, named, self.line))

    def _call_function_ex(self, each: Instruction) -> None:
        # From Python 3.14 on, the keywords are always there.
        named = self._pop() if each.arg & 1 or each.effect < -3 else ()
        row, callee = self._pop(), self._pop()
        if callee is NULL or (self.stack and self.stack[-1] is NULL):
            callee = self._pop() if callee is NULL else callee
            if self.stack and self.stack[-1] is NULL:
                self._pop()
        self._push(self.reader.call_spread(callee, row, named, self.line))

    def _call_by_count(self, each: Instruction) -> None:
        if each.name.startswith("CALL_INTRINSIC"):
            if each.value not in ("INTRINSIC_LIST_TO_TUPLE", 6) and "LIST_TO_TUPLE" not in str(each.value):
                self._generic(each)
            return
        self._generic(each)

    def _is_super(self, callee: Values) -> bool:
        return any(isinstance(thing, Fixed) and thing.value is super for thing in callee)

    def _super(self) -> Values:
        kind = self.reader.cell(self.cells.get("__class__"), self.line)
        first = self.code.co_varnames[0] if self.code.co_argcount else ""
        return self.reader.super_of(kind, self._local(first))

    def _before_with(self, each: Instruction) -> None:
        manager = self._pop()
        line = self.line
        self._push(UNKNOWN)
        self._push(self.reader.call(self.reader.attribute(manager, "__enter__", line), [], {}, line))
        self.reader.call(self.reader.attribute(manager, "__exit__", line), [UNKNOWN] * 3, {}, line)

    def _setup_with(self, each: Instruction) -> None:
        self._jump(each.target, [*self.stack[:-1], UNKNOWN, *[UNKNOWN] * 6])
        self._before_with(each)

    def _load_special(self, each: Instruction) -> None:
        names = ("__enter__", "__exit__", "__aenter__", "__aexit__")
        manager = self._pop()
        found = self.reader.attribute(manager, names[each.arg], self.line) if each.arg < 2 else UNKNOWN
        self.stack += [found, NULL]

    def _with_except_start(self, each: Instruction) -> None:
        self._push(UNKNOWN)

    def _check_exc_match(self, each: Instruction) -> None:
        self._pop()
        self._push(UNKNOWN)

    def _jump_if_not_exc_match(self, each: Instruction) -> bool:
        self._pop_many(2)
        self._jump(each.target)
        return True


def instructions_at(code: CodeType, offset: int | None) -> Instruction | None:
    """The instruction at a place."""
    return next((each for each in instructions_of(code) if each.offset == offset), None)


def _symbols() -> Mapping[int, str]:
    import dis

    return {number: symbol for number, (_, symbol) in enumerate(getattr(dis, "_nb_ops", ()))}


def _names_functions() -> bool:
    """Whether a function's name is on the stack, too: before Python 3.11."""
    import sys

    return sys.version_info < (3, 11)


def _texts(values: Values) -> tuple[str, ...]:
    parts = next((thing for thing in values if isinstance(thing, Parts)), None)
    return tuple(plain_value(item)[1] for item in parts.items) if parts else ()


def _is_long(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return len(value) > _LONG
    return isinstance(value, int) and value.bit_length() > 256
