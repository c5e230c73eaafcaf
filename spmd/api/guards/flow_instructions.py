"""Instructions that branch, loop and call."""

from __future__ import annotations

from types import CodeType

from spmd.api.guards.instructions import Instruction, instructions_of
from spmd.api.guards.stack_frame import StackFrame
from spmd.api.guards.things import NULL, UNKNOWN, Fixed, Made, Parts, Values, constant, plain_value, union


class FlowInstructions(StackFrame):
    """Branches, loops, functions, calls, context managers."""

    def _get_iter(self, each: Instruction) -> None:
        self._push(self.reader.row((self.reader.iterated(self._pop(), self.line),)))

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
        """Decide a conditional jump, where that follows from what is read."""
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


def _names_functions() -> bool:
    """True if a function's name is on the stack, too: before Python 3.11."""
    import sys

    return sys.version_info < (3, 11)


def _texts(values: Values) -> tuple[str, ...]:
    parts = next((thing for thing in values if isinstance(thing, Parts)), None)
    return tuple(plain_value(item)[1] for item in parts.items) if parts else ()
