"""What a function reads beside its arguments: globals, closure variables, and attributes of what they hold.

A program has what it read when it was traced. So that it is not used after a change, the places that the code of the
function names are found in its bytecode, with those of the user's functions that it calls, and compared at each call,
by identity. What is read in other ways (`getattr` by a computed name, files, the time) is not seen.
"""

from __future__ import annotations

import argparse
import functools
import io
import sys
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from spmd.api.places import (
    VALUES,
    Place,
    Slots,
    container_key,
    is_array,
    is_generator,
    is_library,
    is_users,
    items_of,
    names_but,
    names_in,
    nested,
    same,
    shown,
    wrapped_by,
)
from spmd.core.modules import ModuleStructure, Same, reader, version_of
from spmd.core.static_key import static_key
from spmd.job.user_code import is_installed, is_user_file

_FUNCTIONS, _PLACES, _ITEMS = 64, 256, 64  # at most so many are looked at

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_NAMESPACES = (SimpleNamespace, argparse.Namespace)
_SPECIAL = ["call", "getitem", "contains", "iter", "next", "len", "bool", "enter", "exit", "getattr"]
"""The special methods that are looked at, as no name of code names them."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class HiddenState:
    """What a function reads beside its arguments, as it is now; equal for equal values, but for writes to tensors.

    Args:
        function: the function.
        module: the module that it is or of which it is a method: its state is an argument.
        ignored: the ids of lists and dicts that the function itself changes, and of the code of functions that programs
            call; those that are found are added.

    Attributes:
        key: a key for each label.
        versions: how often each of the tensors was written to.
        unchanged: says whether all is as it was.
        generators: Python's and NumPy's generators of random numbers, with their labels.
        iterators: the labels of iterators.
    """

    def __init__(self, function: Any, module: nn.Module | None, ignored: set[int]) -> None:
        self._root, self._ignored = (function, module), ignored
        self.places: dict[tuple[int, str], Place] = {}
        self.key: dict[str, Any] = {}
        self._codes: dict[int, CodeType] = {}
        self._names: dict[str, None] = {}  # a set in an order that is the same on all ranks
        self._objects: dict[int, tuple[str, Any, Any]] = {}
        self._containers: dict[int, tuple[str, Any, list[Any]]] = {}
        self._tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._modules: dict[int, tuple[str, nn.Module, Callable[[Any], Any], list[Any]]] = {}
        self._arrays: list[tuple[Any, bytes]] = []
        self.generators: list[tuple[str, Any]] = []
        self.iterators: list[str] = []
        self._seen: dict[int, Any] = {}
        if module is not None:
            self._seen[id(module)] = module
            self.visit_methods(module)
        self._visit("", function)
        self._visit_attributes()
        tensors = [*(x for _, x in self._tensors.values())]
        tensors += [x for *_, leaves in self._modules.values() for x in leaves]
        self._counted = [x for x in tensors if not x.is_inference()]
        self.versions = [version_of(x) for x in self._counted]
        self.unchanged = self._checker()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HiddenState) and self.key == other.key

    def __hash__(self) -> int:
        return 0  # what is equal may change: see `forget`

    def _visit_attributes(self) -> None:
        """Look at the attributes of objects that any of the functions names; these may lead to more."""
        done: set[tuple[int, str]] = set()
        while True:
            found = [
                (label, held, name)
                for label, _, held in self._objects.values()
                for name in self._names
                if name in held and (id(held), name) not in done and not name.startswith("__")
            ]
            if not found or len(self.places) > _PLACES:
                return
            for label, held, name in found:
                done.add((id(held), name))
                self._place(f"{label}.{name}" if label else name, held, name, held[name])

    def _visit(self, label: str, value: Any, depth: int = 3) -> None:
        if type(value) in VALUES or id(value) in self._seen or depth == 0:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._tensors[id(value)] = label, value
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, MethodType):
            self._visit(label, value.__func__)
            self._visit("self", value.__self__)
        elif isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self._visit(label, item)
        elif isinstance(value, nn.Module):
            self._visit_module(label, value)
        elif isinstance(value, ModuleType):
            if is_user_file(getattr(value, "__file__", None) or "<frozen>"):
                self._objects[id(value)] = label, value, vars(value)
        elif (wrapped := wrapped_by(value)) is not None:
            self._visit(label, wrapped)
        elif is_array(value):
            if value.size <= _ITEMS:
                self._arrays.append((value, value.tobytes()))
                self.key[f"the values of {label}"] = value.dtype.str, value.shape, value.tobytes()
        elif is_generator(value):
            self.generators.append((label, value))
        else:
            self._visit_items(label, value, depth)
            self._visit_object(label, value)

    def _visit_items(self, label: str, value: Any, depth: int) -> None:
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            self.iterators.append(label)
        held = value.data if isinstance(value, (UserDict, UserList)) else value
        if not isinstance(held, _CONTAINERS) or len(held) > _ITEMS or id(held) in self._ignored:
            return
        items = items_of(held)
        self._containers[id(held)] = label, held, items
        self.key[f"the items of {label}"] = container_key(held)
        for item in items:
            self._visit(f"{label}[...]", item, depth - 1)

    def _visit_object(self, label: str, value: Any) -> None:
        kind = value if isinstance(value, type) else type(value)
        if not is_users(kind) and not isinstance(value, _NAMESPACES):
            return
        if hasattr(value, "__dict__"):
            self._objects[id(value)] = label, value, vars(value)
        if kind is not value and (slots := Slots(value)).names:
            self._objects[id(slots)] = label, value, slots
        self._visit_class(label, kind)

    def _visit_class(self, label: str, kind: type) -> None:
        """Look at what a class and its bases have of the names in code, and at their special methods."""
        for base in filter(is_users, kind.__mro__):
            self._objects.setdefault(id(base), (label, base, vars(base)))
            for name in _SPECIAL:
                if isinstance(method := vars(base).get(f"__{name}__"), FunctionType):
                    self._visit_function(method)

    def _visit_module(self, label: str, module: nn.Module) -> None:
        structure, leaves = ModuleStructure.of(module)
        self._modules[id(module)] = label, module, reader(structure), leaves
        self.key[f"the module {label or type(module).__name__}"] = structure, tuple(map(Same, leaves))
        self.visit_methods(module)

    def visit_methods(self, module: nn.Module) -> None:
        """Look at the code of a module: at hooks and `forward`, and at what this calls of the user's own classes."""
        for owner in module.modules():
            kind: Any = type(owner)
            hooks = [hook for name in _HOOKS for hook in vars(owner)[name].values()]
            for function in (getattr(kind, "forward", None), *hooks):
                self._visit("a hook", function)
            if is_users(kind) and not is_installed(getattr(sys.modules[kind.__module__], "__file__", None) or ""):
                self._visit_class(kind.__name__, kind)

    def _visit_function(self, function: FunctionType) -> None:
        code = function.__code__
        if (
            id(code) in self._codes
            or id(code) in self._ignored
            or len(self._codes) >= _FUNCTIONS
            or not is_user_file(code.co_filename)
        ):
            return
        self._codes[id(code)] = code
        names, free = names_in(code), code.co_freevars
        if not self._ignored.isdisjoint(map(id, nested(code))):
            names, free = names_but(code, self._ignored)
        self._names |= dict.fromkeys(names)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name not in free:
                continue
            try:
                self._place(name, cell, name, cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        for name in names:
            if name in function.__globals__:
                self._place(name, function.__globals__, name, function.__globals__[name])
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit("a default", value)

    def _place(self, label: str, holder: Any, name: str, value: Any) -> None:
        if (id(holder), name) in self.places or is_library(value):
            return
        self.places[id(holder), name] = Place(label, holder, name, value)
        label = label if label not in self.key else f"{label} ({len(self.key)})"
        self.key[label] = static_key(value) if type(value) in VALUES else Same(value)
        self._visit(label, value)

    def _checker(self) -> Callable[[], bool]:
        """A function that says whether nothing has changed, generated for speed."""
        space: dict[str, Any] = {}

        def refer(target: Any) -> str:
            space[name := f"g{len(space)}"] = target
            return name

        tests = []
        for place in self.places.values():
            if isinstance(place.holder, CellType):
                read = f"{refer(place.holder)}.cell_contents"
            elif isinstance(place.holder, Slots):
                read = f"{refer(place.holder.owner)}.{place.name}"
            else:
                read = f"{refer(place.holder)}[{place.name!r}]"
            tests.append(f"{read} is {refer(place.value)}")
        for _, value, items in self._containers.values():
            if not isinstance(value, (tuple, frozenset)):
                values = f"values({refer(value)})" if isinstance(value, dict) else refer(value)
                tests.append(f"len({refer(value)}) == {len(items)} and all(map(same, {values}, {refer(items)}))")
        tests += [f"{refer(value)}.tobytes() == {refer(data)}" for value, data in self._arrays]
        for _, module, read_module, leaves in self._modules.values():
            tests.append(f"(found := {refer(read_module)}({refer(module)})) is not None")
            tests.append(f"all(map(same, found, {refer(leaves)}))")
        tests += [f"{refer(x)}._version == {n}" for x, n in zip(self._counted, self.versions, strict=True)]
        lines = ["def unchanged():", "    try:", f"        return {' and '.join(tests) or 'True'}"]
        lines += ["    except (KeyError, ValueError, AttributeError):", "        return False"]
        space |= {"same": same, "values": dict.values}
        exec(compile("\n".join(lines), "<spmd hidden state>", "exec"), space)
        return space["unchanged"]  # type: ignore[no-any-return]

    def differences(self, old: HiddenState) -> Iterator[str]:
        """What has changed since, in words."""
        for label in [*self.key, *(label for label in old.key if label not in self.key)]:
            now, before = self.key.get(label), old.key.get(label)
            if now != before:
                yield f"{label} is {shown(now)}, and was {shown(before)}"
        if self.key == old.key and self.versions != old.versions:
            held = [label for label, _ in self._tensors.values()]
            held += [f"the module {label}" for label, *_ in self._modules.values()]
            yield f"a closed-over tensor was written to ({', '.join(held)})"

    def forget(self, changed: set[int]) -> None:
        """Leave out containers that the function itself changes, by their ids."""
        self._ignored |= changed
        for number in changed:
            label, _, _ = self._containers.pop(number)
            self.key.pop(f"the items of {label}", None)
        self.unchanged = self._checker()

    def leave_out(self, functions: Iterable[Callable[..., Any]]) -> None:
        """Leave out what functions read and change that the program calls, and not the trace."""
        before = len(self._ignored)
        for function in functions:
            while isinstance(function, functools.partial):
                function = function.func
            inner = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
            code = getattr(inner, "__code__", None)  # without any, it is a method of a list, for example
            self._ignored.add(id(getattr(function, "__self__", None) if code is None else code))
        if len(self._ignored) > before:
            self.__init__(*self._root, self._ignored)  # type: ignore[misc]

    @property
    def objects(self) -> list[tuple[str, Any]]:
        """The namespaces of objects and classes, each with its label."""
        return [(label, held) for label, _, held in self._objects.values()]

    @property
    def containers(self) -> list[tuple[str, Any, list[Any]]]:
        """The lists, dicts and the like, each with its label and the items that it had."""
        return list(self._containers.values())

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the function closes over."""
        return [module for _, module, *_ in self._modules.values()]

    @property
    def codes(self) -> list[CodeType]:
        """The code of the functions that were looked at."""
        return list(self._codes.values())
