"""The specs that results are given: those of `out_specs`, or without it those of the arguments that they replace.

A state that a function returns goes in again at the next call. With the specs that it came with, that call is the same
program.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any

import attrs
import optree

from spmd.core.mesh import Mesh
from spmd.core.pytree import leaf_meta, leaf_specs, tree_flatten, tree_flatten_with_accessor
from spmd.core.pytree import path_text as path_of
from spmd.core.spec import FREE, DTensorSpec, TensorMeta, has_meta


@attrs.frozen(eq=False)
class Argument:
    """An argument, of which a result may take the specs.

    Args:
        label: what messages call it.
        name: the name of its parameter.
        position: its position among the arguments that are not static.
        donated: whether it is donated.
        tree: its structure.
        specs: the spec of each leaf; None for one that is no tensor.
    """

    label: str
    name: str
    position: int
    donated: bool
    tree: optree.PyTreeSpec
    specs: tuple[DTensorSpec | None, ...]


@attrs.frozen(eq=False)
class ResultSpecs:
    """The spec of each leaf of a result.

    Args:
        specs: the specs; None for a leaf that is no tensor, and for one that the planner lays out.
        taken: the parts of the result that take the specs of an argument, each with the argument, in words.
    """

    specs: Sequence[DTensorSpec | None]
    taken: tuple[tuple[str, str], ...] = ()


def result_specs(out_specs: Any, result: Any, mesh: Mesh, arguments: Sequence[Argument]) -> ResultSpecs:
    """The specs that a result is given.

    Args:
        out_specs: that of `jit`.
        result: the result, with tensors or metas.
        mesh: the mesh.
        arguments: the arguments of the call.

    Raises:
        ShardingError: `out_specs` does not fit the result.
    """
    if out_specs is None:
        return _replacing(result, arguments)
    given = None if out_specs is FREE else out_specs
    names: dict[str, Any] = {"what": "out_specs", "item": "result", "of": "the result"}
    return ResultSpecs(leaf_specs(given, result, mesh, optional=True, only_tensors=True, **names))


@attrs.frozen(eq=False)
class _ResultItem:
    """A result, or an item of one: its leaves are those from `start` on."""

    label: str
    key: Any
    position: int | None
    tree: optree.PyTreeSpec
    metas: tuple[TensorMeta | None, ...]
    start: int

    def equals(self, other: _ResultItem) -> bool:
        return self.metas == other.metas and self.tree == other.tree

    def replaces(self, argument: Argument) -> bool:
        """True if it may take an argument's specs: one tensor only a donated one's."""
        metas = tuple(spec and spec.meta for spec in argument.specs)
        several = sum(meta is not None for meta in metas) > 1
        return (several or argument.donated) and self.metas == metas and self.tree == argument.tree


def _replacing(result: Any, arguments: Sequence[Argument]) -> ResultSpecs:
    leaves, tree = tree_flatten(result)
    metas = tuple(leaf_meta(leaf, "") if has_meta(leaf) else None for leaf in leaves)
    whole = _ResultItem("the result", None, None, tree, metas, 0)
    chosen = _choose([whole], arguments) or _choose(list(_items(result, whole)), arguments)
    specs: list[DTensorSpec | None] = [None] * len(leaves)
    for part, argument in chosen:
        specs[part.start : part.start + len(part.metas)] = [spec and spec.complete for spec in argument.specs]
    return ResultSpecs(specs, tuple((part.label, f"argument {argument.label}") for part, argument in chosen))


def _items(result: Any, whole: _ResultItem) -> Iterator[_ResultItem]:
    """The items of a tuple, named tuple or dict that a function returns; those of a dict as it has put them in."""
    if not issubclass(whole.tree.type or NoneType, (tuple, dict)):
        return
    start, found = 0, {}
    accessors, _, _ = tree_flatten_with_accessor(result, is_leaf=lambda node: node is not result)
    for accessor, key, tree in zip(accessors, whole.tree.entries(), whole.tree.children(), strict=True):
        metas = whole.metas[start : start + tree.num_leaves]
        found[key] = _ResultItem(f"result {path_of(accessor)}", key, None, tree, metas, start)
        start += tree.num_leaves
    for position, key in enumerate(result if isinstance(result, dict) else found):
        yield attrs.evolve(found[key], position=position)


def _choose(parts: Sequence[_ResultItem], arguments: Sequence[Argument]) -> list[tuple[_ResultItem, Argument]]:
    """The parts that take the specs of an argument; each argument serves one.

    Items of a dict take those of the parameter that they are named after. Else, where as many parts as arguments are
    equal, they go in order; else a part takes those of the argument at its position, a donated one, or the first.
    """
    names = {argument.name for argument in arguments}
    remaining, chosen = list(arguments), []
    for part in sorted(parts, key=lambda part: part.key not in names):
        candidates = [argument for argument in arguments if part.replaces(argument)]
        in_order = len(candidates) == sum(map(part.equals, parts))
        free = [argument for argument in candidates if argument in remaining]
        if free:
            argument = min(free, key=functools.partial(_rank, part, in_order))
            remaining.remove(argument)
            chosen.append((part, argument))
    return chosen


def _rank(part: _ResultItem, in_order: bool, argument: Argument) -> tuple[bool | int, ...]:
    """The place of an argument among those whose specs a part may take: the first one is taken."""
    elsewhere = not in_order and argument.position != part.position
    return argument.name != part.key, elsewhere, not in_order and not argument.donated, argument.position
