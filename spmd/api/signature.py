"""Signatures: what the calls that share a program have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import attrs
import optree
from torch._C._functorch import peek_interpreter_stack

from spmd.api.parameters import ArgumentOrder
from spmd.api.values.arguments import own_spec
from spmd.api.values.leaves import DYNAMIC, as_argument, key_of
from spmd.core.containers import ints_in_fields
from spmd.core.mesh import Mesh
from spmd.core.pytree import broadcast_prefix, tree_flatten, with_module_states
from spmd.core.spec import DTensorSpec, TensorMeta, has_meta
from spmd.core.static_key import static_key
from spmd.runtime.torch_settings import torch_settings

Static: TypeAlias = tuple[tuple[int, Any], ...]
"""The static arguments of a call: position and cache key of each, by position."""


@attrs.frozen(slots=False, eq=False)
class CallArguments:
    """The arguments of a call: by position, and flattened once, when they are first asked for.

    Args:
        layout: which arguments are given, in order.
        by_position: the arguments.
        static: the static ones.
        dynamic: the others, in which modules are trees of tensors.
        has_modules: whether there are modules.
    """

    layout: ArgumentOrder
    by_position: tuple[Any, ...]
    static: Static
    dynamic: tuple[Any, ...]
    has_modules: bool

    @classmethod
    def of(cls, layout: ArgumentOrder, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> CallArguments:
        """The arguments of a call that gives them by position and by name."""
        by_position = layout.positional(args, keywords)
        static, dynamic = split(by_position, layout.static)
        states = with_module_states(dynamic)
        return cls(layout, by_position, static, states, states is not dynamic)

    @cached_property
    def _flat(self) -> tuple[list[Any], optree.PyTreeSpec]:
        leaves, tree = tree_flatten(self.dynamic)
        return list(map(as_argument, leaves)), tree

    @property
    def leaves(self) -> list[Any]:
        """The leaves of the dynamic arguments, in a new list."""
        return list(self._flat[0])

    @property
    def tree(self) -> optree.PyTreeSpec:
        """The structure of the dynamic arguments."""
        return self._flat[1]

    def with_dynamic(self, dynamic: Iterable[Any]) -> tuple[Any, ...]:
        """The arguments by position, with others in place of the dynamic ones."""
        return with_dynamic(self.by_position, self.static, dynamic)


@attrs.frozen(slots=False)
class Signature:
    """What the calls that share a program have in common: all but the values and the specs of tensors; a cache key.

    Args:
        settings: torch's settings that a program depends on.
        mesh: the mesh.
        layout: which arguments are given, in order.
        static: the static arguments.
        tree: the structure of the tuple of dynamic arguments.
        metas: the meta of each tensor among the leaves of the dynamic arguments; None for a leaf that is unknown.
        own: for each of these tensors, the spec that it brings because `in_specs` has none for it; else None.
        others: the position among the leaves, and the key, of each that is no tensor (`key_of`).
    """

    settings: tuple[Any, ...]
    mesh: Mesh
    layout: ArgumentOrder
    static: Static
    tree: optree.PyTreeSpec
    metas: tuple[TensorMeta | None, ...]
    own: tuple[DTensorSpec | None, ...]
    others: tuple[tuple[int, Any], ...] = ()

    @classmethod
    def of(cls, call: CallArguments, mesh: Mesh, in_specs: Any) -> Signature:
        """The signature of a call.

        Raises:
            ShardingError: `in_specs` does not match the arguments, or one without a spec is no tensor.
        """
        layout, leaves, tree = call.layout, call.leaves, call.tree
        keys = list(map(key_of, leaves))
        others = tuple((position, key) for position, key in enumerate(keys) if key is not None)
        prefix, of = layout.prefix(in_specs), layout.described
        given = broadcast_prefix(prefix, call.dynamic, what="in_specs", of=of, optional=True)
        paths = layout.paths(tree) if None in given else [""] * len(leaves)
        metas, own = [], []
        for leaf, spec, path, key in zip(leaves, given, paths, keys, strict=True):
            if key is None:
                metas.append(TensorMeta.of(leaf) if has_meta(leaf) else None)
                own.append(own_spec(leaf, mesh, f"argument {path}") if spec is None else None)
        return cls(torch_settings(), mesh, layout, call.static, tree, tuple(metas), tuple(own), others)

    @property
    def key(self) -> tuple[Any, ...]:
        """The part that a call knows before it looks at its dynamic arguments, as `Compiled.match` does."""
        return self.settings, self.mesh, self.layout, self.static

    @cached_property
    def paths(self) -> list[str]:
        """The path of each leaf of the dynamic arguments."""
        return self.layout.paths(self.tree)

    @property
    def ints(self) -> Iterator[tuple[str, int]]:
        """The ints among the dynamic arguments, each with its path: leaves, and in fields of dataclasses and others."""
        yield from ((self.paths[position], key[1]) for position, key in self.others if key[0] is int)
        for number, child in zip(self.layout.dynamic, self.tree.children(), strict=True):
            yield from ints_in_fields(child, str(self.layout.labels[number]))

    def tensors(self, leaves: Sequence[Any]) -> list[Any]:
        """The tensors among the leaves of the dynamic arguments, or what belongs to them among what belongs to all."""
        others = dict(self.others)
        return [leaf for position, leaf in enumerate(leaves) if position not in others]

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The position of each tensor among the leaves of the dynamic arguments."""
        return tuple(self.tensors(range(self.tree.num_leaves)))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The positions of the dynamic numbers among the leaves of the dynamic arguments."""
        return tuple(position for position, key in self.others if key == DYNAMIC)

    def numbers_of(self, leaves: Sequence[Any]) -> tuple[float, ...]:
        """The dynamic numbers among the leaves of the dynamic arguments of a call of this signature."""
        return tuple(leaves[position] for position in self.numbers)

    @property
    def donated(self) -> frozenset[int]:
        """The positions of the donated tensors among the tensors of the dynamic arguments."""
        owners = self.tensors(
            [
                number
                for number, subtree in zip(self.layout.dynamic, self.tree.children(), strict=True)
                for _ in range(subtree.num_leaves)
            ]
        )
        return frozenset(position for position, owner in enumerate(owners) if owner in self.layout.donated)


def split(args: tuple[Any, ...], static: Sequence[int]) -> tuple[Static, tuple[Any, ...]]:
    """The static and the dynamic arguments of a call.

    >>> split(("add", 1.0, 2.0), (0,))
    (((0, (<class 'str'>, 'add')),), (1.0, 2.0))
    """
    if not static:
        return (), args
    keys = tuple((number, static_key(args[number])) for number in static)
    return keys, tuple(arg for number, arg in enumerate(args) if number not in static)


def with_dynamic(args: tuple[Any, ...], static: Static, dynamic: Iterable[Any]) -> tuple[Any, ...]:
    """The arguments with others in place of the dynamic ones.

    >>> static, _ = split(("add", 1.0, 2.0), (0,))
    >>> with_dynamic(("add", 1.0, 2.0), static, (3.0, 4.0))
    ('add', 3.0, 4.0)
    """
    numbers, values = {number for number, _ in static}, iter(dynamic)
    return tuple(arg if number in numbers else next(values) for number, arg in enumerate(args))


def with_gradients(function: Callable[..., Any], static: Sequence[int], positions: Sequence[int]) -> Callable[..., Any]:
    """A function in which some of its arguments are leaves of autograd, for backward passes that it calls.

    Args:
        function: the function.
        static: the positions of its static arguments.
        positions: which of the leaves of the others require grad.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        keys = tuple((number, None) for number in static)
        leaves, tree = tree_flatten(tuple(arg for number, arg in enumerate(args) if number not in static))
        for position in positions:
            if not leaves[position].requires_grad and peek_interpreter_stack() is None:
                leaves[position] = leaves[position].detach().requires_grad_()
        return function(*with_dynamic(args, keys, tree.unflatten(leaves)))

    return call
