"""Which source files are the user's code, for messages that name a line."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import FrameType

import attrs
import optree
import torch

from spmd import errors

_INTERNAL = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (torch.__file__, optree.__file__, attrs.__file__, errors.__file__)
    if file
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = os.path.dirname(os.path.abspath(contextlib.__file__)) + os.sep
_INSTALLED = ("site-packages", "dist-packages")  # may be inside the standard library's folder


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Whether a code object's file is the user's: not torch, optree, attrs, spmd, the standard library or generated."""
    if file.startswith("<"):
        return file.startswith(("<stdin>", "<ipython", "<doctest", "<string>"))
    if file.startswith(_STANDARD) and not file[len(_STANDARD) :].startswith(_INSTALLED):
        return False
    return not file.startswith(_INTERNAL)


def is_torch_file(file: str) -> bool:
    """Test for a file of torch."""
    return file.startswith(_TORCH)


def is_installed(file: str) -> bool:
    """Whether a file is of a package that is installed beside torch, and not the user's own."""
    return any(name in file for name in _INSTALLED)


def user_line() -> str:
    """The file and line of the innermost user code on the stack, as `train.py:22`."""
    return line_in(sys._getframe(1))


def line_in(frame: FrameType | None) -> str:
    """The file and line of the innermost user code from a frame outward."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "no line of the user's"
