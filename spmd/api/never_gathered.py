"""`keep_sharded`: arguments that a plan never gathers, so that a layout is what it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from spmd.core.argument_paths import find_inputs
from spmd.core.mesh import Mesh
from spmd.errors import PlanError

KeepSharded: TypeAlias = Mapping[int | str, str | Sequence[str]]
"""Arguments by position, parts of them by path (`"0['params']"`) or single inputs by their names in the program, and
the mesh axes along which they stay cut."""


def parse_keep_sharded(given: KeepSharded | None) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The paths and their axes; PlanError where they are something else."""
    entries = given.items() if isinstance(given, Mapping) else () if given is None else None
    if entries is None or not all(isinstance(path, (int, str)) for path, _ in entries):
        raise PlanError(
            "keep_sharded maps positions of arguments, or paths such as \"0['params']\", to mesh axes "
            f"(got {given!r}). Write keep_sharded={{0: 'model'}}."
        )
    return tuple((str(path), (axes,) if isinstance(axes, str) else tuple(axes)) for path, axes in entries)


def never_gathered_inputs(
    entries: Sequence[tuple[str, tuple[str, ...]]], paths: Sequence[str], names: Sequence[str], mesh: Mesh
) -> dict[int, frozenset[str]]:
    """The mesh axes along which each input is kept, by its position among the flat inputs.

    Args:
        entries: as `parse_keep_sharded` gives them.
        paths: where each flat input stands among the arguments: `0['w']`.
        names: the name of each in the program: `params_w`.
        mesh: the mesh.

    Raises:
        PlanError: an axis that the mesh lacks, or a path at which no argument stands.
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
