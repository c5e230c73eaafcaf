"""The leaves of a checkpoint: their types, and the names under which they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch

from spmd.api.values.dtensor import DTensor
from spmd.checkpoint.position import Position
from spmd.collectives.distributed.agreement import describe
from spmd.core.argument_paths import dotted_path
from spmd.core.containers import values_as_leaves
from spmd.core.pytree import tree_flatten_with_accessor
from spmd.errors import CheckpointError


def named_leaves(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[str], list[Any], optree.PyTreeSpec]:
    """The name and value of every leaf of a pytree, and its structure.

    A name is the path to the leaf (keys, numbers, and fields) joined by dots, as DCP names the leaves of nested dicts.
    A tree that is itself a leaf has the name `value`.

    Args:
        tree: a pytree.
        is_leaf: whether a node is a leaf although it is a container.

    Raises:
        CheckpointError: two leaves have the same name.

    >>> named_leaves({"params": [{"w": 1.0}], "step": 3})[0]
    ['params.0.w', 'step']
    """
    with values_as_leaves():
        accessors, leaves, structure = tree_flatten_with_accessor(tree, is_leaf)
    names = [dotted_path(accessor) or "value" for accessor in accessors]
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        ways = " and ".join(
            accessor.codify("") for accessor, name in zip(accessors, names, strict=True) if name == repeated
        )
        raise CheckpointError(f"Two leaves would be stored as {repeated!r}: {ways}. Rename one of the keys.")
    return names, leaves, structure


def name_of_process(name: str, process: int | str) -> str:
    """The name under which a process stores a `Position` that is not that of the first process."""
    return f"{name}@{process}"


def describe_leaf(leaf: Any) -> str:
    """A leaf as text, by which ranks compare it: a DTensor's spec and mesh, a tensor's digest, or the Python value."""
    if isinstance(leaf, Position):  # the rest may differ
        return f"a Position at step {leaf.step}"
    if isinstance(leaf, DTensor):
        return f"{leaf.spec} on {leaf.mesh}"
    return describe(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
