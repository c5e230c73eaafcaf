"""The option `keep_sharded`: arguments that a plan never gathers along given mesh axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from spmd.core.argument_paths import find_inputs
from spmd.core.mesh import Mesh
from spmd.errors import PlanError

KeepSharded: TypeAlias = Mapping[int | str, str | Sequence[str]]
"""The mesh axes along which arguments stay sharded. A key is an argument's position, the path of a part of one
(`"0['params']"`), or the name of an input in the program."""


def parse_keep_sharded(given: KeepSharded | None) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The value of `keep_sharded` as pairs of a path and mesh axes; PlanError if it is not such a mapping."""
    entries = given.items() if isinstance(given, Mapping) else () if given is None else None
    if entries is None or not all(isinstance(path, (int, str)) for path, _ in entries):
        raise PlanError(
            "keep_sharded maps positions of arguments, or paths such as \"0['params']\", to mesh axes "
            f"(got {given!r}). Write keep_sharded={{0: 'model'}}."
        )
    found = {str(path): tuple(axes) if isinstance(axes, (tuple, list)) else (axes,) for path, axes in entries}
    for path, axes in found.items():
        if not all(isinstance(axis, str) for axis in axes):
            raise PlanError(f"keep_sharded[{path!r}] must be a mesh axis, or several in a tuple (got {axes!r:.60}).")
    return tuple(found.items())


def never_gathered_inputs(
    entries: Sequence[tuple[str, tuple[str, ...]]], paths: Sequence[str], names: Sequence[str], mesh: Mesh
) -> dict[int, frozenset[str]]:
    """The mesh axes along which inputs are never gathered, by position among the flat inputs.

    Args:
        entries: the result of `parse_keep_sharded`.
        paths: the path of each flat input in the arguments, such as `0['w']`.
        names: the name of each flat input in the program, such as `params_w`.
        mesh: the mesh.

    Raises:
        PlanError: an axis that the mesh does not have, or a path that matches no argument.
    """
    kept: dict[int, frozenset[str]] = {}
    for path, axes in entries:
        for axis in axes:
            if axis not in mesh.names:
                raise PlanError(f"keep_sharded[{path!r}] names axis {axis!r}, which {mesh} lacks.")
        found = find_inputs(path, paths, names)
        if not found:
            raise PlanError(
                f"keep_sharded names {path!r}, where no argument stands. The arguments are {', '.join(paths)}."
            )
        for number in found:
            kept[number] = kept.get(number, frozenset()) | frozenset(axes)
    return kept
