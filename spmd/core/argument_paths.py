"""The paths of leaves as dotted names, and the inputs of a program that a text names: a path, or an input's name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import optree


def dotted_path(accessor: Iterable[optree.PyTreeEntry]) -> str:
    """The path to a leaf as keys, numbers and fields with dots between them; empty for a tree that is a leaf.

    >>> import optree
    >>> [dotted_path(accessor) for accessor in optree.tree_accessors({"layers": [{"w": 1.0}], "step": 3})]
    ['layers.0.w', 'step']
    """
    return ".".join(
        str(entry.entry) if isinstance(entry, optree.MappingEntry) else entry.codify("").strip(".[]")
        for entry in accessor
    )


def find_inputs(text: str, paths: Sequence[str], names: Sequence[str]) -> list[int]:
    """The indices of the inputs that a text names; empty if it names none.

    Args:
        text: a path to an argument or to a part of one, as in error messages (`0['w'][1]`) or with dots (`0.w[1]`), or
            the name of one input in the program (`params_w_1`).
        paths: the path of each input in the arguments; empty if the paths are not known.
        names: the name of each input in the program.

    >>> paths, names = ("0['w'][0]", "0['w'][1]", "1"), ("params_w_0", "params_w_1", "x")
    >>> find_inputs("0.w", paths, names), find_inputs("0['w'][1]", paths, names), find_inputs("x", paths, names)
    ([0, 1], [1], [2])
    """
    wanted = _steps(text)
    under = [number for number, path in enumerate(paths) if wanted and _steps(path)[: len(wanted)] == wanted]
    return under or [number for number, name in enumerate(names) if name == text.removeprefix("%")]


def _steps(path: str) -> list[str]:
    return re.findall(r"[^\[\]'\".]+", path)
