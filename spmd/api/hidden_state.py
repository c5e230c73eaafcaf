"""What a function reads beside its arguments: globals, closure variables, and attributes of what they hold.

A program has what it read when it was traced. So that it is not used after a change, the places that the code of the
function names are found in its bytecode, with those of the user's functions that it calls, and compared at each call,
by identity. What is read in other ways (`getattr` by a computed name, files, the time) is not seen.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from spmd.core.modules import ModuleStructure, Same, reader, version_of
from spmd.core.static_key import static_key
from spmd.job.user_code import is_user_file
from spmd.tracing.source import source_at

_FUNCTIONS, _PLACES, _ITEMS = 64, 256, 64  # at most so many are looked at
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


Attributes: TypeAlias = list[tuple[nn.Module, dict[str, Any]]]
"""Modules, each with a copy of its attributes."""


class SideEffectWarning(UserWarning):
    """A function under jit does what only its trace does: a program holds operators only."""


@attrs.frozen(eq=False)
class Place:
    """Where a function reads a value.

    Args:
        label: its name in messages.
        holder: the namespace that has it, or the cell of a closure.
        name: its name in the namespace.
        value: what it holds.
    """

    label: str
    holder: Any
    name: str
    value: Any

    @property
    def now(self) -> Any:
        """What it holds now."""
        try:
            return self.holder.cell_contents if isinstance(self.holder, CellType) else self.holder[self.name]
        except (KeyError, ValueError):
            return _MISSING


_MISSING = object()


class HiddenState:
    """What a function reads beside its arguments, as it is now; equal for equal values, but for writes to tensors.

    Args:
        function: the function.
        module: the module that it is or of which it is a method: its state is an argument.
        ignored: the ids of lists and dicts that the function itself changes; those that it does are added.

    Attributes:
        key: a key for each label.
        versions: how often each of the tensors was written to.
        unchanged: says whether all is as it was.
    """

    def __init__(self, function: Any, module: nn.Module | None, ignored: set[int]) -> None:
        self._ignored = ignored
        self.places: dict[tuple[int, str], Place] = {}
        self.key: dict[str, Any] = {}
        self._codes: dict[int, CodeType] = {}
        self._names: set[str] = set()
        self._objects: dict[int, tuple[str, Any, Mapping[str, Any]]] = {}
        self._containers: dict[int, tuple[str, Any, list[Any]]] = {}
        self._tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._modules: dict[int, tuple[str, nn.Module, Callable[[Any], Any], list[Any]]] = {}
        self._attributes: Attributes = []
        self._seen: dict[int, Any] = {}
        if module is not None:
            self._seen[id(module)] = module
            self._visit_forwards(module)
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
        return 0  # what is equal may change: see `_forget`

    def _visit_attributes(self) -> None:
        """Look at the attributes of objects that any of the functions names; these may lead to more."""
        done: set[tuple[int, str]] = set()
        while True:
            found = [
                (label, held, name)
                for label, _, held in self._objects.values()
                for name in self._names
                if name in held and (id(held), name) not in done
            ]
            if not found or len(self.places) > _PLACES:
                return
            for label, held, name in found:
                done.add((id(held), name))
                self._place(f"{label}.{name}" if label else name, held, name, held[name])

    def _visit(self, label: str, value: Any, depth: int = 3) -> None:
        if type(value) in _VALUES or id(value) in self._seen or depth == 0:
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
        elif type(value) in (list, tuple, dict):
            if len(value) > _ITEMS or id(value) in self._ignored:
                return
            items = list(value.values()) if type(value) is dict else list(value)
            self._containers[id(value)] = label, value, items
            self.key[f"the items of {label}"] = _container_key(value)
            for item in items:
                self._visit(f"{label}[...]", item, depth - 1)
        elif callable(value) and hasattr(value, "__wrapped__"):
            self._visit(label, value.__wrapped__)
        elif isinstance(value, type) or _is_users_object(value):
            self._visit_object(label, value)

    def _visit_object(self, label: str, value: Any) -> None:
        kind = value if isinstance(value, type) else type(value)
        if not _is_users(kind):
            return
        if hasattr(value, "__dict__"):
            self._objects[id(value)] = label, value, vars(value)
        if kind is not value:
            self._objects.setdefault(id(kind), (label, kind, vars(kind)))
            if isinstance(called := vars(kind).get("__call__"), FunctionType):
                self._visit_function(called)

    def _visit_module(self, label: str, module: nn.Module) -> None:
        structure, leaves = ModuleStructure.of(module)
        self._attributes += attributes_of([module])
        self._modules[id(module)] = label, module, reader(structure), leaves
        self.key[f"the module {label or type(module).__name__}"] = structure, tuple(map(Same, leaves))
        self._visit_forwards(module)

    def _visit_forwards(self, module: nn.Module) -> None:
        for owner in module.modules():
            forward = getattr(type(owner), "forward", None)
            if isinstance(forward, FunctionType):
                self._visit_function(forward)

    def _visit_function(self, function: FunctionType) -> None:
        code = function.__code__
        if id(code) in self._codes or len(self._codes) >= _FUNCTIONS or not is_user_file(code.co_filename):
            return
        self._codes[id(code)] = code
        names = _names(code)
        self._names |= names
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
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
        if (id(holder), name) in self.places or _is_library(value):
            return
        self.places[id(holder), name] = Place(label, holder, name, value)
        label = label if label not in self.key else f"{label} ({len(self.key)})"
        self.key[label] = static_key(value) if type(value) in _VALUES else Same(value)
        self._visit(label, value)

    def _checker(self) -> Callable[[], bool]:
        """A function that says whether nothing has changed, generated for speed."""
        space: dict[str, Any] = {}

        def refer(target: Any) -> str:
            space[name := f"g{len(space)}"] = target
            return name

        tests = []
        for place in self.places.values():
            read = "cell_contents" if isinstance(place.holder, CellType) else None
            held = refer(place.holder)
            tests.append(
                f"{held}.{read} is {refer(place.value)}" if read else f"{held}[{place.name!r}] is {refer(place.value)}"
            )
        for _, value, items in self._containers.values():
            if type(value) is not tuple:
                values = f"{refer(value)}.values()" if type(value) is dict else refer(value)
                tests.append(f"len({refer(value)}) == {len(items)} and all(map(same, {values}, {refer(items)}))")
        for _, module, read_module, leaves in self._modules.values():
            tests.append(f"(found := {refer(read_module)}({refer(module)})) is not None")
            tests.append(f"all(map(same, found, {refer(leaves)}))")
        tests += [f"{refer(x)}._version == {n}" for x, n in zip(self._counted, self.versions, strict=True)]
        lines = ["def unchanged():", "    try:", f"        return {' and '.join(tests) or 'True'}"]
        lines += ["    except (KeyError, ValueError):", "        return False"]
        space["same"] = _same
        exec(compile("\n".join(lines), "<spmd hidden state>", "exec"), space)
        return space["unchanged"]  # type: ignore[no-any-return]

    def differences(self, old: HiddenState) -> Iterator[str]:
        """What has changed since, in words."""
        for label in [*self.key, *(label for label in old.key if label not in self.key)]:
            now, before = self.key.get(label), old.key.get(label)
            if now != before:
                yield f"{label} is {_shown(now)}, and was {_shown(before)}"
        if self.key == old.key and self.versions != old.versions:
            held = [label for label, _ in self._tensors.values()]
            held += [f"the module {label}" for label, *_ in self._modules.values()]
            yield f"a closed-over tensor was written to ({', '.join(held)})"

    def _forget(self, changed: set[int]) -> None:
        """Leave out containers that the function itself changes."""
        self._ignored |= changed
        for number in changed:
            label, _, _ = self._containers.pop(number)
            self.key.pop(f"the items of {label}", None)
        self.unchanged = self._checker()

    def warn_of_effects(self, draws: Any, attributes: Attributes) -> None:
        """Warn of what the function has done to its surroundings while it was traced.

        Args:
            draws: what `generators_now` returned before.
            attributes: what `attributes_of` returned before for the modules among its arguments.
        """
        for owner, before in [*self._attributes, *attributes]:
            for name, now in list(vars(owner).items()):
                if now is not before.get(name):
                    self._visit_forwards(owner)  # to find the line
                    place = Place(f"{type(owner).__name__}.{name}", vars(owner), name, before.get(name))
                    self._warn_of_change(place, now)
        for place in self.places.values():
            now = place.now
            if now is place.value or now is _MISSING:
                continue
            self._warn_of_change(place, now)
        grown = set()
        for number, (label, value, items) in self._containers.items():
            found = list(value.values()) if type(value) is dict else list(value)
            if len(found) != len(items) or not all(map(_same, found, items)):
                grown.add(number)
            if any(map(_is_traced, found)):
                _warn(
                    f"A traced tensor, which has no value, was put into {label} at "
                    f"{self._line(label.rpartition('.')[2], ('LOAD_GLOBAL', 'LOAD_DEREF', 'LOAD_ATTR'))}. Return it."
                )
        for label, _, held in self._objects.values():
            for name, value in list(held.items()):
                if _is_traced(value) and (id(held), name) not in self.places:
                    line = self._line(name, ("STORE_ATTR",))
                    _warn(f"{label}.{name} = ... at {line} keeps a traced tensor, which has no value. Return it.")
        if grown:
            self._forget(grown)
        if generators_now() != draws:
            _warn(
                f"Random numbers of Python or NumPy are drawn at {self._line('random', _LOADS)}, when the function is "
                "traced only: every call has the same. Draw by torch.rand, or pass the numbers as an argument."
            )

    def _warn_of_change(self, place: Place, now: Any) -> None:
        line = self._line(place.name, ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"))
        if _is_traced(now):
            _warn(f"{place.label} = ... at {line} keeps a traced tensor, which has no value. Return it.")
        else:
            _warn(
                f"{place.label} = ... at {line} changes what the function reads, from {_brief(place.value)} to "
                f"{_brief(now)}: a program does not do this, so each call is traced anew. Pass it as an argument, and "
                "return the new value; or keep it in a buffer of a module."
            )

    def _line(self, name: str, operations: tuple[str, ...]) -> str:
        """The line of the first instruction of the functions with such a name."""
        for code in self._codes.values():
            line = code.co_firstlineno
            for instruction in (i for each in _nested(code) for i in dis.get_instructions(each)):
                line = instruction.starts_line or line
                if instruction.opname in operations and str(instruction.argval).startswith(name):
                    return _where(code, line)
        found = next(iter(self._codes.values()), None)
        return "an unknown line" if found is None else _where(found, found.co_firstlineno)


_LOADS = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD", "LOAD_NAME", "IMPORT_NAME")


def attributes_of(modules: Iterable[nn.Module]) -> Attributes:
    """The submodules of the user's classes, each with a copy of its attributes."""
    owners = {id(owner): owner for module in modules for owner in module.modules() if _is_users_object(owner)}
    return [(owner, dict(vars(owner))) for owner in owners.values()]


def generators_now() -> Any:
    """The states of Python's and NumPy's random generators."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else repr(numpy.random.get_state())


def _warn(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, SideEffectWarning, stacklevel=2)


_warned: set[str] = set()


def _same(one: Any, other: Any) -> bool:
    return one is other


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """The global names and attributes in a code object and in functions that it makes."""
    return frozenset(name for each in _nested(code) for name in each.co_names)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _where(code: CodeType, line: int) -> str:
    source = source_at(code.co_filename, line)
    return f"{source} (`{source.code}`)" if source.code else str(source)


@functools.lru_cache(maxsize=4096)
def _is_users(kind: Any) -> bool:
    """Whether a class is one of the user's code."""
    module = sys.modules.get(kind.__module__)
    return module is not None and is_user_file(
        getattr(module, "__file__", None) or "<stdin>" * (kind.__module__ == "__main__")
    )


def _is_users_object(value: object) -> bool:
    kind: Any = type(value)
    return _is_users(kind)


def _is_library(value: Any) -> bool:
    """Whether a value is a function, class or module that is not the user's, which nobody changes."""
    if isinstance(value, ModuleType):
        return not is_user_file(getattr(value, "__file__", None) or "<frozen>")
    if isinstance(value, FunctionType):
        return not is_user_file(value.__code__.co_filename)
    if isinstance(value, type):
        return not _is_users(value)
    return callable(value) and type(value).__module__ == "builtins" and not isinstance(value, MethodType)


def _is_traced(value: Any) -> bool:
    return isinstance(value, (FakeTensor, FunctionalTensor))


def _container_key(value: Any) -> Any:
    if type(value) is dict:
        return tuple((_item_key(name), _item_key(item)) for name, item in value.items())
    return type(value), tuple(map(_item_key, value))


def _item_key(value: Any) -> Any:
    return static_key(value) if type(value) in _VALUES else Same(value)


def _shown(key: Any) -> str:
    if type(key) is tuple and len(key) == 2 and isinstance(key[0], type):
        return _brief(key[1])
    return "not there" if key is None else "another"


def _brief(value: Any) -> str:
    return f"{value!r:.40}" if type(value) in _VALUES else type(value).__name__
