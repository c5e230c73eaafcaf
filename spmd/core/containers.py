"""Classes that are containers without a registration with optree: dataclasses, and those that torch's pytrees know.

`register_containers` registers them in our optree namespace when one is first met where a leaf is expected. There are
four kinds, in this order:

- Caches of transformers: what their attributes hold.
- What `torch.utils._pytree` knows, such as transformers' `ModelOutput` and TensorDict: the children that it says.
- Subclasses of `collections.UserDict`, such as transformers' `BatchEncoding`: their items. Other attributes are lost.
- Dataclasses and attrs classes: their fields. No `__init__` or `__post_init__` is called to make one.

The children of an object with fields are those fields that hold tensors, floats or containers of these. Fields that
hold other values are part of the structure, as static arguments are: functions of other values are other programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

import attrs
import optree
import torch
from torch.utils import _pytree as torch_pytree

from spmd.core.spec import has_meta
from spmd.core.static_key import static_key
from spmd.core.value_types import CONSTANTS, EXACT, VALUES

NAMESPACE = "spmd"
"""The optree namespace of containers: users register their own in it, and `register_containers` others."""

_TENSORS = {torch.Tensor, torch.nn.Parameter}
_ATTRIBUTES = {("transformers.cache_utils", name) for name in ("Cache", "CacheLayerMixin")}
"""Classes whose instances have no fields but attributes: what torch would call to make one computes with tensors."""

_Names: TypeAlias = Callable[[Any], Iterable[str]]
"""The names of the fields of an object."""

_values_are_leaves: ContextVar[bool] = ContextVar("values_are_leaves", default=False)
_registered: dict[type, _Names | None] = {}
_lock = threading.Lock()


def register_containers(leaves: Iterable[Any]) -> bool:
    """Register the classes of leaves that are containers; whether there are any that were not registered.

    >>> optree.tree_leaves(UserDict(w=1), namespace=NAMESPACE)
    [{'w': 1}]
    >>> register_containers([UserDict(w=1), 2]), register_containers([UserDict(w=1)])
    (True, False)
    >>> optree.tree_leaves(UserDict(w=1), namespace=NAMESPACE)
    [1]
    """
    kinds = {type(leaf): leaf for leaf in leaves if type(leaf) not in _TENSORS}
    new = [leaf for kind, leaf in kinds.items() if kind not in _registered and _register(kind, leaf)]
    return bool(new)


@contextlib.contextmanager
def values_as_leaves() -> Iterator[None]:
    """A context in which numbers and text in fields are children, as for checkpoints, which store them."""
    token = _values_are_leaves.set(True)
    try:
        yield
    finally:
        _values_are_leaves.reset(token)


def is_registered(node: Any) -> bool:
    """Whether an object is a container of a class that `register_containers` has registered."""
    return type(node) in _registered


def fields_of(node: Any) -> dict[str, Any] | None:
    """The fields of an object that is a container by its fields, with their values; None for any other."""
    names = _registered.get(type(node))
    return None if names is None else {name: getattr(node, name) for name in names(node) if hasattr(node, name)}


def declared_constants(structure: optree.PyTreeSpec) -> dict[str, Any] | None:
    """The numbers, texts and Nones in the fields of an object of a structure.

    None if there are values of other types, if the class does not declare its fields, or if the object lacks one.
    """
    names = _registered.get(structure.type)
    if names is None or names is vars:
        return None
    node = structure.one_level().unflatten([None] * structure.num_children)
    fields = fields_of(node) or {}
    constants = {name: value for name, value in fields.items() if name not in structure.entries()}
    if len(fields) < len(tuple(names(node))) or any(type(value) not in EXACT for value in constants.values()):
        return None
    return constants


def ints_in_fields(structure: optree.PyTreeSpec, path: str) -> Iterator[tuple[str, int]]:
    """The ints in fields of the objects in a structure, which are part of it, each with its path.

    >>> State = attrs.make_class("State", ["w", "step"])
    >>> State.__module__ = "train"
    >>> register_containers([state := State(1.0, step=3)])
    True
    >>> list(ints_in_fields(optree.tree_structure([state], namespace=NAMESPACE), "0"))
    [('0[0].step', 3)]
    """
    if structure.is_leaf():
        return
    top = structure.one_level()
    if structure.type in _registered:
        names = set(structure.entries())
        fields = fields_of(top.unflatten([None] * structure.num_children)) or {}
        for name, value in fields.items():
            if type(value) is int and name not in names:
                yield f"{path}.{name}", value
    for accessor, child in zip(top.accessors(), structure.children(), strict=True):
        yield from ints_in_fields(child, accessor.codify(path))


def _register(kind: type, leaf: Any) -> bool:
    """Register a class, if it is one of a container."""
    if issubclass(kind, (torch.Tensor, torch.nn.Module, *VALUES)) or kind.__module__.partition(".")[0] == "spmd":
        return False
    if not optree.tree_is_leaf(leaf, namespace=NAMESPACE):  # of a container that the caller takes for a leaf
        return False
    names: _Names | None = None
    torch_node = torch_pytree.SUPPORTED_NODES.get(kind)
    if any((base.__module__, base.__name__) in _ATTRIBUTES for base in kind.__mro__):
        names, adapted = vars, (*_by_fields(vars), optree.GetAttrEntry)
    elif torch_node is not None:
        adapted = _by_torch(torch_node, leaf)
    elif issubclass(kind, UserDict):
        adapted = _by_items(kind)
    elif has_meta(leaf) or (names := _declared(kind)) is None:
        return False
    else:
        adapted = (*_by_fields(names), optree.GetAttrEntry)
    with _lock:
        if kind not in _registered:
            flatten, unflatten, entry = adapted
            optree.register_pytree_node(kind, flatten, unflatten, path_entry_type=entry, namespace=NAMESPACE)
            _registered[kind] = names
    return True


class _Static:
    """What a container has beside its children: compared by its key, which distinguishes types."""

    __slots__ = ("_hash", "key", "kind", "value")

    def __init__(self, kind: type, value: Any) -> None:
        self.kind, self.value, self.key = kind, _copied(value), _key(value)
        self._hash = hash((kind, self.key))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and (self.kind, self.key) == (other.kind, other.key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self.value)


class _Unhashable:
    """A value in a key that compares, but has no hash."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unhashable) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


def _key(value: Any) -> Any:
    """A key of a value as `static_key`, also of lists, dicts and sets, and of what has no hash."""
    kind = type(value)
    if kind in (list, tuple):
        return kind, tuple(map(_key, value))
    if kind is dict:
        return kind, tuple((_key(name), _key(item)) for name, item in value.items())
    if kind in (set, frozenset):
        return kind, frozenset(map(_key, value))
    try:
        hash(key := static_key(value))
    except TypeError:
        return kind, _Unhashable(value)
    return key


def _copied(value: Any) -> Any:
    """A value with copies of the lists, dicts and sets in it, which may change."""
    kind = type(value)
    if kind in (list, tuple, set):
        return kind(map(_copied, value))
    return {name: _copied(item) for name, item in value.items()} if kind is dict else value


def _declared(kind: type) -> _Names | None:
    """The names of the fields that a class declares; None for a class that declares none."""
    if any("__new__" in vars(base) for base in kind.__mro__[:-1]) or issubclass(kind, Mapping):  # more than its fields
        return None
    if dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))
    elif attrs.has(kind):
        names = tuple(field.name for field in attrs.fields(kind))
    else:
        return None
    return lambda node: names


_Adapted: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]


def _by_fields(names: _Names) -> _Adapted:
    def flatten(node: Any) -> tuple[tuple[Any, ...], _Static, tuple[str, ...]]:
        children: dict[str, Any] = {}
        static: dict[str, Any] = {}
        for name in names(node):
            if hasattr(node, name):  # a field with init=False need not have a value
                value = getattr(node, name)
                (static if _is_static(value) else children)[name] = value
        entries = tuple(children)
        return tuple(children.values()), _Static(type(node), (entries, static)), entries

    def unflatten(held: _Static, children: Iterable[Any]) -> Any:
        entries, static = held.value
        made: Any = object.__new__(held.kind)
        for name, value in {**_copied(static), **dict(zip(entries, children, strict=True))}.items():
            object.__setattr__(made, name, value)
        return made

    return flatten, unflatten


def _by_items(kind: type) -> tuple[Any, ...]:
    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        names = tuple(node.data)
        return tuple(node.data.values()), names, names

    def unflatten(names: tuple[Any, ...], children: Iterable[Any]) -> Any:
        return kind(dict(zip(names, children, strict=True)))

    return flatten, unflatten, optree.MappingEntry


def _by_torch(node: torch_pytree.NodeDef, example: Any) -> tuple[Any, ...]:
    """The functions of torch's pytree, and how paths show the children of such an example."""
    with_keys = node.flatten_with_keys_fn
    keys = [] if with_keys is None else [key for key, _ in with_keys(example)[0]]
    attribute, entry = next(
        (
            (attribute, entry)
            for kind, attribute, entry in (
                (torch_pytree.MappingKey, "key", optree.MappingEntry),
                (torch_pytree.GetAttrKey, "name", optree.GetAttrEntry),
            )
            if keys and all(isinstance(key, kind) for key in keys)
        ),
        (None, optree.SequenceEntry),
    )

    def flatten(value: Any) -> tuple[tuple[Any, ...], _Static, tuple[Any, ...] | None]:
        children, context = node.flatten_fn(value)
        entries = None
        if attribute is not None and with_keys is not None:
            entries = tuple(getattr(key, attribute) for key, _ in with_keys(value)[0])
        return tuple(children), _Static(node.type, context), entries

    def unflatten(held: _Static, children: Iterable[Any]) -> Any:
        return node.unflatten_fn(list(children), _copied(held.value))

    return flatten, unflatten, entry


def _is_static(value: Any) -> bool:
    """Whether the value of a field is part of the structure: a constant, or lists and dicts of constants."""
    if _is_leaf_value(value):
        return False
    if value is None or type(value) in VALUES:
        return True
    if isinstance(value, torch.Tensor) or has_meta(value):
        return False
    leaves = optree.tree_leaves(value, namespace=NAMESPACE)
    if register_containers(leaves):
        return _is_static(value)
    if not leaves or any(map(_is_leaf_value, leaves)):
        return False
    return all(map(_is_constant, leaves))


def _is_leaf_value(value: Any) -> bool:
    """Whether a Python value in a field is a child: floats, which are dynamic, and others where values are leaves."""
    return (
        type(value) is float
        or isinstance(value, torch.SymFloat)
        or (_values_are_leaves.get() and type(value) in VALUES)
    )


def _is_constant(leaf: Any) -> bool:
    """Whether a leaf is no tensor and compares by value: what compares by identity may hold anything."""
    if isinstance(leaf, CONSTANTS):
        return True
    kind: Any = type(leaf)
    if isinstance(leaf, torch.nn.Module) or has_meta(leaf) or kind.__module__.partition(".")[0] == "spmd":
        return False
    return kind.__hash__ is not None and (kind.__eq__ is not object.__eq__ or callable(leaf))
