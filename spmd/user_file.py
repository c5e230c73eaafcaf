"""Which files are the user's."""

from __future__ import annotations

import contextlib
import functools
import os

import attrs
import optree
import torch

_INTERNAL = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (torch.__file__, optree.__file__, attrs.__file__, __file__)
    if file
)
_INTERNAL_FILES = frozenset({contextlib.__file__, functools.__file__})


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Whether a code object's file is the user's: neither torch nor this package nor generated code."""
    if file.startswith("<"):
        return file.startswith(("<stdin>", "<ipython", "<doctest", "<string>"))
    return file not in _INTERNAL_FILES and not file.startswith(_INTERNAL)
