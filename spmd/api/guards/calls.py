"""Calls: of functions, methods, classes, modules, and of what is written in C."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution

from spmd.api.guards.access import Access, Attribute, Closure, Item, Line
from spmd.api.guards.builtin_calls import FUNCTIONS, HOST_CALLS, method
from spmd.api.guards.checks import (
    ByIdentity,
    ByValue,
    OfFunction,
    OfKeys,
    OfModule,
)
from spmd.api.guards.following import Following
from spmd.api.guards.frame import Frame
from spmd.api.guards.kinds import (
    is_library_code,
    is_own,
    is_own_code,
    is_users_object,
    wrapped_by,
)
from spmd.api.guards.limits import CALLS
from spmd.api.guards.members import member
from spmd.api.guards.things import (
    UNKNOWN,
    Bound,
    BuiltinMethod,
    Fixed,
    Made,
    Parts,
    Values,
    union,
)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Calls(Following):
    """Follows calls."""

    def call(self, callee: Values, args: Sequence[Values], named: dict[str, Values], line: Line) -> Values:
        """The result of a call."""
        return union(*(self._call(thing, list(args), named, line) for thing in callee)) or UNKNOWN

    def call_spread(self, callee: Values, row: Values, named: Values, line: Line) -> Values:
        """The result of a call with `*row` and `**named`."""
        args: list[Values] = list(self.items_for_extension(row)) if row else []
        exact = len(row) == 1 and isinstance(row[0], Parts) and row[0].exact
        if not exact and args:
            args = args if len(row) == 1 and isinstance(row[0], Access) else [union(*args)] * 8
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
        self.whole_arguments(args, named, line)
        return UNKNOWN

    def whole_arguments(self, args: Sequence[Values], named: dict[str, Values], line: Line) -> None:
        for values in (*args, *named.values()):
            self.whole(values, line)

    def _call_builtin(self, value: Any, args: list[Values], named: dict[str, Values], line: Line) -> Values:
        with contextlib.suppress(TypeError):
            if value in FUNCTIONS and not named:
                return FUNCTIONS[value](self, args, line)
        self.whole_arguments(args, named, line)
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
            return self.call_of_module(access, args, named, line)
        if isinstance(value, type):
            return self._construct(access, args, named, line)
        if (wrapped := wrapped_by(value)) is not None:
            inner = access.child(Attribute("__wrapped__"), wrapped, line, watched=access.watched)
            return self._call(inner, args, named, line)
        if is_users_object(value) and isinstance(member(type(value), "__call__")[1], FunctionType):
            return self.call(self.member_of(type(value), "__call__", access, line), args, named, line)
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
        if issubclass(access.value, Distribution):  # it decides which checks of values the program has
            validates = access.value._validate_args
            access.child(Attribute("_validate_args"), validates, line, watched=True).expect(ByValue)
        if is_own(access.value) and isinstance(member(access.value, "__init__")[1], FunctionType):
            self.call(self.member_of(access.value, "__init__", access, line), [UNKNOWN, *args], named, line)
        self.whole_arguments(args, named, line)
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
                    self.by_identity(thing)
                args = args[1:]
            self.whole_arguments(args, named, line)
            if wrapped_by(function) is not None:
                self.content(access.child(Attribute("__wrapped__"), wrapped_by(function), line, watched=False), line)
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

    def _bind(
        self, code: Any, args: Sequence[Values], named: dict[str, Values], defaults: dict[str, Values]
    ) -> dict[str, Values]:
        """The parameters of a call."""
        count = code.co_argcount
        names = code.co_varnames[: count + code.co_kwonlyargcount]
        local = dict.fromkeys(names, UNKNOWN) | defaults
        local |= dict(zip(names[:count], args, strict=False))
        local |= {name: values for name, values in named.items() if name in names}
        place = count + code.co_kwonlyargcount
        if code.co_flags & 4:
            local[code.co_varnames[place]] = self.row(args[count:])
            place += 1
        if code.co_flags & 8:
            rest = {name: values for name, values in named.items() if name not in names}
            local[code.co_varnames[place]] = self.row(tuple(rest.values()), tuple(rest), site=code)
        return local

    def run_unknown(self, made: Made, line: Line) -> None:
        local = self._bind(made.code, [], {}, {}) | self._made_defaults(made)
        if made.code.co_varnames[:1] == (".0",):
            local[".0"] = UNKNOWN
        self._run(made.code, local, made.cells, made.globals, line)

    def _run(self, code: Any, local: dict[str, Values], cells: Any, names: Access, line: Line) -> Values:
        key = code, tuple(local.items()), tuple(self.cell(each, line) for each in cells.values())
        if key in self._running:
            return self._running[key]
        if self._depth >= CALLS:
            self.whole_arguments(list(local.values()), {}, line)
            return UNKNOWN
        self._running[key] = UNKNOWN
        self._depth += 1
        try:
            result = Frame(self, code, local, cells, names, line).run()
        finally:
            self._depth -= 1
        if code.co_flags & 0x20:  # a generator
            result = self.row((result,))
        self._running[key] = result
        return result

    def call_of_module(self, access: Access, args: list[Values], named: dict[str, Values], line: Line) -> Values:
        """A call of a module: its hooks, and the `forward`s of all of its own classes."""
        if not access.covered:
            access.expect(OfModule)
        result: Values = UNKNOWN
        self.whole_arguments(args, named, line)
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
                forward = self.member_of(kind, "forward", inner, line)
                if owner is access.value:
                    result = self.call(forward, args, named, line)
                else:
                    self.call(forward, [], {}, line)
        return result
