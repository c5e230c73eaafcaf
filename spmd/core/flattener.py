"""Flattening trees of one known structure, by code that is generated for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import optree

from spmd.core.containers import declared_constants
from spmd.core.generated import define
from spmd.core.modules import ModuleState, reader, structures_in
from spmd.core.pytree import tree_flatten

Flattener: TypeAlias = Callable[[Any], list[Any] | None]
"""Returns the leaves of trees of one structure, and None for other trees."""

_SEQUENCES = (optree.PyTreeKind.TUPLE, optree.PyTreeKind.LIST, optree.PyTreeKind.NAMEDTUPLE)


def flattener(structure: optree.PyTreeSpec) -> Flattener:
    """A function like `tree_flatten` for trees of one structure, about ten times as fast.

    What stands in the place of a leaf is returned without a look at its type: it may be a container.

    >>> flatten = flattener(optree.tree_structure(({"w": 1, "b": 2}, [3])))
    >>> flatten(({"b": 5, "w": 6}, [7])), flatten(({"b": 5}, [7])), flatten(({"b": 5, "w": 6}, (7,)))
    ([5, 6, 7], None, None)
    """
    writer = _CheckWriter()
    leaves = ", ".join(writer.leaves("tree", structure))
    lines = ["def flatten(tree):", "    try:", *writer.lines, f"        return [{leaves}]"]
    lines += ["    except (KeyError, AttributeError):", "        return None"]
    flatten: Any = define("flatten", lines, writer.namespace, "<spmd flattener>")
    flatten.structure = structure
    return flatten  # type: ignore[no-any-return]


class _CheckWriter:
    """The lines that check the containers of a tree, and the objects that they refer to by name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.namespace: dict[str, Any] = {}

    def leaves(self, node: str, structure: optree.PyTreeSpec) -> list[str]:
        """The expressions of the leaves below a node, an expression, after lines that check the node."""
        if structure.is_leaf():
            return [node]
        found, kind = f"v{len(self.lines)}", structure.kind
        if structure.type is ModuleState:
            ((_, module),) = structures_in(structure)
            self.check(f"({found} := {self.refer(reader(module))}({node})) is None")
            return [f"*{found}"]
        if kind is optree.PyTreeKind.CUSTOM and (constants := declared_constants(structure)) is not None:
            return self.fields(found, node, structure, constants)
        if kind not in (*_SEQUENCES, optree.PyTreeKind.DICT):
            self.check(f"({found} := {self.refer(_by_optree(structure))}({node})) is None")
            return [f"*{found}"]
        keys = structure.entries() if kind is optree.PyTreeKind.DICT else range(structure.num_children)
        self.check(f"type({found} := {node}) is not {self.refer(structure.type)} or len({found}) != {len(keys)}")
        children = zip(keys, structure.children(), strict=True)
        return [leaf for key, child in children for leaf in self.leaves(f"{found}[{self.refer(key)}]", child)]

    def fields(self, found: str, node: str, structure: optree.PyTreeSpec, constants: dict[str, Any]) -> list[str]:
        """As `leaves`, of an object that has these constants in its other fields."""
        self.check(f"type({found} := {node}) is not {self.refer(structure.type)}")
        for name, value in constants.items():
            expected, kind = self.refer(value), self.refer(type(value))
            self.check(f"type(field := {found}.{name}) is not {kind} or field != {expected}")
        children = zip(structure.entries(), structure.children(), strict=True)
        return [leaf for name, child in children for leaf in self.leaves(f"{found}.{name}", child)]

    def check(self, differs: str) -> None:
        """Add the line that returns None where a condition holds."""
        self.lines.append(f"        if {differs}: return None")

    def refer(self, target: Any) -> str:
        """An expression of an object."""
        if type(target) in (int, str):
            return repr(target)
        name = f"g{len(self.namespace)}"
        self.namespace[name] = target
        return name


def _by_optree(structure: optree.PyTreeSpec) -> Flattener:
    """As `flattener`, by optree."""

    def flatten(tree: Any) -> list[Any] | None:
        leaves, found = tree_flatten(tree)
        return leaves if found == structure else None

    return flatten
