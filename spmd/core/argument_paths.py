"""Which inputs of a program a text names: by where they stand among the arguments, or by their names in it."""

from __future__ import annotations

import re
from collections.abc import Sequence


def find_inputs(text: str, paths: Sequence[str], names: Sequence[str]) -> list[int]:
    """The positions of the inputs that a text names; none if there are none.

    Args:
        text: a path to an argument or to a part of one, as in error messages (`0['w'][1]`) or with dots (`0.w[1]`), or
            the name of one input in the program (`params_w_1`).
        paths: where each input stands among the arguments, as far as that is known.
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
