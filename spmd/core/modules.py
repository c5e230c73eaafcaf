"""Modules as containers: their parameters and buffers by dotted names, and what else a program depends on.

`ModuleState` takes the place of an `nn.Module` in a pytree: its children are the tensors, each once where several names
are tied, and its static part is a `ModuleStructure`. Two modules of equal structures share programs.
"""

from __future__ import annotations

import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import attrs
import optree
import torch
from torch import nn

from spmd.core.contents import DEPTH, contents_checker, contents_of
from spmd.core.static_key import static_key
from spmd.core.value_types import PLAIN
from spmd.errors import ShardingError

Slot: TypeAlias = tuple[dict[str, Any], str]
"""A place where a module holds a tensor: the dict of its parameters or buffers, and the name in it."""

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ATOMS = (types.ModuleType, nn.Module, weakref.ReferenceType)  # and what is callable
_METHODS = "_spmd_methods"


@attrs.frozen(eq=False)
class Same:
    """An object that is equal to itself only."""

    target: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.target is other.target

    def __hash__(self) -> int:
        return id(self.target)

    def __repr__(self) -> str:
        return type(self.target).__name__


@attrs.frozen(eq=False)
class ModuleStructure:
    """A module, but for the values of its tensors; structures are equal if programs of one serve the other.

    Args:
        module: the module.
        names: the dotted name of each tensor, as in `named_parameters` and `named_buffers`.
        slots: the places of each tensor, several if it is tied.
        count: how many of the tensors are parameters; buffers follow.
        requires_grad: for each tensor whether it does.
        key: what else programs depend on: classes, tied names, training flags, hooks, and plain attributes.
    """

    module: nn.Module
    names: tuple[str, ...]
    slots: tuple[tuple[Slot, ...], ...]
    count: int
    requires_grad: tuple[bool, ...]
    key: tuple[Any, ...] = attrs.field(repr=False)

    @classmethod
    def of(cls, module: nn.Module) -> tuple[ModuleStructure, list[torch.Tensor]]:
        """The structure of a module, and its tensors."""
        slots: dict[int, list[Slot]] = {}
        names, leaves = [], []
        for kind in ("_parameters", "_buffers"):
            for prefix, owner in module.named_modules():
                for name, tensor in vars(owner)[kind].items():
                    if tensor is None:
                        continue
                    if id(tensor) not in slots:
                        names.append(f"{prefix}.{name}" if prefix else name)
                        leaves.append(tensor)
                    slots.setdefault(id(tensor), []).append((vars(owner)[kind], name))
            if kind == "_parameters":
                count = len(leaves)
        keys = _Keys({held: number for number, held in enumerate(slots)})
        flags = tuple(leaf.requires_grad for leaf in leaves)
        key = (tuple(names), count, flags, tuple(map(keys.module, *zip(*module.named_modules(), strict=True))))
        return cls(module, tuple(names), tuple(map(tuple, slots.values())), count, flags, key), leaves

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleStructure) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.names)

    def is_like(self, other: ModuleStructure, reads: Set[tuple[str, str]]) -> bool:
        """Whether structures are equal but for plain attributes that are not read.

        Args:
            other: another structure.
            reads: the attributes that count, as prefixes of submodules with names; `__dict__` stands for all.
        """
        return self.key[:-1] == other.key[:-1] and self._read_key(reads) == other._read_key(reads)

    def _read_key(self, reads: Set[tuple[str, str]]) -> list[Any]:
        found = []
        for prefix, *rest, plain in self.key[-1]:
            every = (prefix, "__dict__") in reads
            found.append((prefix, rest, [item for item in plain if every or (prefix, item[0]) in reads]))
        return found

    @property
    def has_hooks(self) -> bool:
        """Whether a submodule has hooks."""
        return any(hooks for *_, hooks, _ in self.key[-1])

    def __repr__(self) -> str:
        return f"{type(self.module).__name__}, {'training' if self.module.training else 'evaluation'}"


def tied_names(module: nn.Module) -> dict[str, str]:
    """The names of tied tensors that are not the first of their tensor, each with the first.

    >>> layer = nn.Linear(2, 2)
    >>> tied_names(nn.Sequential(layer, layer))
    {'1.weight': '0.weight', '1.bias': '0.bias'}
    """
    first: dict[int, str] = {}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    every = {name: first.setdefault(id(tensor), name) for name, tensor in named}
    return {name: known for name, known in every.items() if name != known}


def by_first_name(specs: Mapping[Any, Any], module: nn.Module) -> dict[Any, Any]:
    """Specs of a module's tensors by any of their names, by the first name of each.

    Raises:
        ShardingError: a tied tensor with two specs.
    """
    tied = tied_names(module)
    found: dict[Any, Any] = {}
    names: dict[Any, Any] = {}
    for name, spec in specs.items():
        first = tied.get(name, name)
        if found.setdefault(first, spec) != spec:
            raise ShardingError(
                f"{names[first]} and {name} of {type(module).__name__} are tied: one tensor, with the specs "
                f"{found[first]!r} and {spec!r}. Choose one."
            )
        names[first] = name
    return found


class ModuleState:
    """A module with given tensors in place of its own, as a container of them."""

    def __init__(self, structure: ModuleStructure, tensors: Sequence[Any]) -> None:
        self.structure, self.tensors = structure, tuple(tensors)

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """A module as it is."""
        return cls(*ModuleStructure.of(module))

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name}={value!r}" for name, value in zip(self.structure.names, self.tensors, strict=True))
        return f"{type(self.structure.module).__name__}({tensors})"


def _flatten(state: ModuleState) -> tuple[tuple[Any, ...], ModuleStructure, tuple[str, ...]]:
    return state.tensors, state.structure, state.structure.names


def register_modules(namespace: str) -> None:
    """Register `ModuleState` with optree."""
    optree.register_pytree_node(
        ModuleState, _flatten, ModuleState, path_entry_type=optree.GetAttrEntry, namespace=namespace
    )


def structures_in(tree: optree.PyTreeSpec) -> Iterator[tuple[int, ModuleStructure]]:
    """The modules in the structure of a pytree, each with the number of its first leaf."""
    first = 0
    if tree.type is ModuleState:
        yield 0, tree.one_level().unflatten([None] * tree.num_children).structure
        return
    for child in () if tree.is_leaf() else tree.children():
        yield from ((first + number, structure) for number, structure in structures_in(child))
        first += child.num_leaves


def reader(structure: ModuleStructure) -> Callable[[Any], list[Any] | None]:
    """A function that returns the tensors of the module as it is now; None if its structure may have changed."""
    root, slots = structure.module, [places[0] for places in structure.slots]
    owners = list(root.modules())
    plain = [(operator.itemgetter(*_read(owner)), vars(owner)) for owner in owners]
    inner = [vars(owner)[name] for owner in owners for name in ("_modules", *_HOOKS) if vars(owner)[name]]
    inner += [vars(value) for value in {id(v): v for owner in owners for v in _objects(owner)}.values()]
    attributes = (vars(owner)[name] for owner in owners for name in _plain(owner))
    unchanged = contents_checker(contents_of([*attributes, *(x for held in inner for x in held.values())]))
    sized = [held for o in owners for held in (vars(o), *(vars(o)[name] for name in _STORES))] + inner
    tied = [(held, name, number) for number, places in enumerate(structure.slots) for held, name in places[1:]]
    empty = [(vars(o)[kind], name) for o in owners for kind in _KINDS for name, x in vars(o)[kind].items() if x is None]
    constants = list(_tensors_outside(owners, structure))
    flags, kinds, version = list(structure.requires_grad), list(map(type, owners)), operator.attrgetter("_version")
    take_flag = operator.attrgetter("requires_grad")

    def now() -> Iterator[Any]:
        yield from (value for get, held in plain for value in get(held))
        yield from itertools.chain.from_iterable(map(dict.values, inner))

    expected = list(now())
    lengths, versions = list(map(len, sized)), list(map(version, constants))

    def read(node: Any) -> list[Any] | None:
        if node is not root or list(map(len, sized)) != lengths or list(map(type, owners)) != kinds:
            return None
        found = list(itertools.chain.from_iterable([get(held) for get, held in plain]))
        found += itertools.chain.from_iterable(map(dict.values, inner))
        if not all(map(operator.is_, found, expected)) or not unchanged() or list(map(version, constants)) != versions:
            return None
        leaves = [held[name] for held, name in slots]
        if any(held[name] is not leaves[number] for held, name, number in tied):
            return None
        if any(held[name] is not None for held, name in empty) or list(map(take_flag, leaves)) != flags:
            return None
        return leaves

    return read


_KINDS = ("_parameters", "_buffers")
_STORES = (*_KINDS, "_modules", *_HOOKS)


def _read(owner: nn.Module) -> tuple[str, ...]:
    """The names of the attributes of a module that programs depend on; one under torch.compile has no flag."""
    return (*(("training",) if "training" in vars(owner) else ()), "_modules", *_plain(owner))


def _plain(owner: nn.Module) -> list[str]:
    """The names of the attributes of a module that are not torch's own bookkeeping."""
    return [name for name in vars(owner) if name not in _INTERNAL and name not in ("training", _METHODS)]


class _Keys:
    """Makes keys of what a module has beside its tensors.

    Args:
        numbers: the numbers of its tensors, by id.
    """

    def __init__(self, numbers: dict[int, int]) -> None:
        self._numbers = numbers
        self._objects: dict[int, Any] = {}

    def module(self, prefix: str, owner: nn.Module) -> Any:
        """What programs depend on in one submodule."""
        attributes, numbers = vars(owner), self._numbers
        tensors = tuple(
            (name, None if x is None else numbers[id(x)]) for kind in _KINDS for name, x in attributes[kind].items()
        )
        hooks = tuple(Same(hook) for name in _HOOKS for hook in attributes[name].values())
        plain = tuple((name, self.value(attributes[name], DEPTH)) for name in _plain(owner))
        return prefix, type(owner), owner.training, tensors, hooks, plain

    def value(self, value: Any, depth: int) -> Any:
        """A key of a plain attribute: values by value, tensors by identity and version, objects by their attributes.

        A tensor that is a parameter or a buffer, too, counts by its number.
        """
        kind = type(value)
        if isinstance(value, torch.Tensor):
            number = self._numbers.get(id(value))
            return (Same(value), version_of(value)) if number is None else ("tensor", number)
        if kind in PLAIN:
            return static_key(value)
        if isinstance(value, _ATOMS) or callable(value) or depth == 0:
            return Same(value)
        if kind in (list, tuple):
            return kind, tuple([self.value(item, depth - 1) for item in value])
        if kind is dict:
            return kind, tuple([(self.value(name, 0), self.value(item, depth - 1)) for name, item in value.items()])
        if hasattr(value, "__dict__"):
            return self._object(value, depth)
        try:
            hash(key := static_key(value))
        except TypeError:
            return Same(value)
        return key

    def _object(self, value: Any, depth: int) -> Any:
        if id(value) not in self._objects:
            self._objects[id(value)] = Same(value)  # where it is met in its own attributes
            items = vars(value).items()
            self._objects[id(value)] = Same(value), tuple([(name, self.value(x, depth - 1)) for name, x in items])
        return self._objects[id(value)]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; 0 if torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _objects(owner: nn.Module) -> list[Any]:
    """The objects in attributes of a module whose own attributes count."""
    held = [vars(owner)[name] for name in _plain(owner)]
    atoms = (*_ATOMS, torch.Tensor)
    return [x for x in held if hasattr(x, "__dict__") and not isinstance(x, atoms) and not callable(x)]


def _tensors_outside(owners: Sequence[nn.Module], structure: ModuleStructure) -> Iterator[torch.Tensor]:
    """The tensors in attributes of a module and its submodules that are neither parameters nor buffers."""
    known = {id(held[name]) for places in structure.slots for held, name in places}
    for x in (vars(owner)[name] for owner in owners for name in _plain(owner)):
        if isinstance(x, torch.Tensor) and id(x) not in known and not x.is_inference():
            yield x
