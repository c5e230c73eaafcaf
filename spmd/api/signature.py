"""Signatures: what the calls that share a program have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import attrs
import optree

from spmd.api.programs.options import Options
from spmd.api.static_arguments import static_key
from spmd.core.mesh import Mesh
from spmd.core.pytree import tree_flatten
from spmd.core.spec import TensorMeta, has_meta
from spmd.errors import TraceError
from spmd.runtime.torch_settings import torch_settings

Static: TypeAlias = tuple[tuple[int, Any], ...]
"""The static arguments of a call: position and cache key of each, by position."""


@attrs.frozen
class Signature:
    """What the calls that share a program have in common: all but the values and the specs of tensors; a cache key.

    Args:
        settings: torch's settings that a program depends on.
        mesh: the mesh.
        static: the static arguments.
        tree: the structure of the tuple of dynamic arguments.
        metas: the meta of each leaf of the dynamic arguments; None for a leaf that is no tensor.
    """

    settings: tuple[Any, ...]
    mesh: Mesh
    static: Static
    tree: optree.PyTreeSpec
    metas: tuple[TensorMeta | None, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], mesh: Mesh, options: Options) -> Signature:
        """The signature of a call.

        Raises:
            TraceError: `static_argnums` names an argument that the call does not have.
        """
        static, dynamic = split(args, options.static_argnums)
        leaves, tree = tree_flatten(dynamic)
        metas = tuple(TensorMeta.of(leaf) if has_meta(leaf) else None for leaf in leaves)
        return cls(torch_settings(), mesh, static, tree, metas)

    @property
    def key(self) -> tuple[Any, ...]:
        """The part that a call knows before it looks at its dynamic arguments, as `Compiled.match` does."""
        return self.settings, self.mesh, self.static

    def donated(self, options: Options) -> frozenset[int]:
        """The positions of the donated tensors among the leaves of the dynamic arguments.

        Raises:
            TraceError: `donate_argnums` names an argument that is static, or that the call does not have.
        """
        static = {number for number, _ in self.static}
        count = len(static) + self.tree.num_children
        donated = _positions(options.donate_argnums, count, "donate_argnums")
        if not static.isdisjoint(donated):
            raise TraceError(
                f"Argument {min(static.intersection(donated))} is both in static_argnums={options.static_argnums} and "
                f"in donate_argnums={options.donate_argnums}. Static arguments hold no tensors that could be donated."
            )
        dynamic = [number for number in range(count) if number not in static]
        owners = [
            number
            for number, subtree in zip(dynamic, self.tree.children(), strict=True)
            for _ in range(subtree.num_leaves)
        ]
        return frozenset(position for position, owner in enumerate(owners) if owner in donated)


def split(args: tuple[Any, ...], static_argnums: Sequence[int]) -> tuple[Static, tuple[Any, ...]]:
    """The static and the dynamic arguments of a call.

    >>> split(("add", 1.0, 2.0), (-3,))
    (((0, (<class 'str'>, 'add')),), (1.0, 2.0))
    """
    if not static_argnums:
        return (), args
    numbers = _positions(static_argnums, len(args), "static_argnums")
    static = tuple((number, static_key(args[number])) for number in numbers)
    return static, tuple(arg for number, arg in enumerate(args) if number not in numbers)


def with_dynamic(args: tuple[Any, ...], static: Static, dynamic: Iterable[Any]) -> tuple[Any, ...]:
    """The arguments with others in place of the dynamic ones.

    >>> static, _ = split(("add", 1.0, 2.0), (0,))
    >>> with_dynamic(("add", 1.0, 2.0), static, (3.0, 4.0))
    ('add', 3.0, 4.0)
    """
    numbers, values = {number for number, _ in static}, iter(dynamic)
    return tuple(arg if number in numbers else next(values) for number, arg in enumerate(args))


def _positions(numbers: Sequence[int], count: int, what: str) -> tuple[int, ...]:
    """Argument numbers counted from the start, without repetitions, in order."""
    for number in numbers:
        if not -count <= number < count:
            raise TraceError(f"{what}={tuple(numbers)} names argument {number}, but the call has {count} arguments.")
    return tuple(sorted({number % count for number in numbers}))
