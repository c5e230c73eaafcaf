"""Functions that are compiled from source which this package writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def define(
    name: str, lines: Sequence[str], namespace: dict[str, Any], file: str, others: Sequence[str] = ()
) -> Callable[..., Any]:
    """Define a function by lines of source.

    Args:
        name: the name of the function.
        lines: the source.
        namespace: the globals of the function; it is not added to them, as such a cycle would keep them all.
        file: the name of the source in tracebacks, in angle brackets.
        others: other functions of the source, which it has as defaults of parameters; they are not added either.

    >>> define("twice", ["def twice(x):", "    return two * x"], {"two": 2}, "<spmd example>")(3)
    6
    """
    exec(compile("\n".join(lines), file, "exec"), namespace)
    for other in others:
        del namespace[other]
    return namespace.pop(name)  # type: ignore[no-any-return]
