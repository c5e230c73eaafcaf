"""Tracebacks without the frames of this package and of torch; as JAX's traceback filtering."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from typing_extensions import ParamSpec

from spmd.errors import SpmdError, shows_internals
from spmd.job.torch_compile import never_compiled
from spmd.job.user_code import is_user_file

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

GENERATED = "<spmd local program>"
"""The name of the file of generated programs; their errors name the user's line themselves."""

_NOTE = (
    "torch raised this{line}, in a function under jit. `with spmd.disable_jit():` runs the function as it is "
    "written, for print and pdb; spmd.errors.show_internals() shows the frames of spmd and torch, which are hidden."
)


def hides_internals(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A public function, whose errors have the user's frames only, unless `errors.show_internals`."""
    return _hiding(function, Exception)


def hides_internals_of_own_errors(
    function: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """As `hides_internals`, for a public function in which Python runs functions of the user's: theirs stay whole."""
    return _hiding(function, SpmdError)


def _hiding(function: Callable[_Arguments, _Result], errors: type[Exception]) -> Callable[_Arguments, _Result]:
    @functools.wraps(function)
    def call(*args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **keywords)
        except errors as error:
            if not shows_internals():
                _hide(error)
            raise  # with the traceback that the error has now, from Python 3.11 on; before, one frame of ours remains

    return never_compiled(call)


def _hide(error: Exception) -> None:
    """Take all frames but the user's out of the traceback of an error, if it is ours or comes from the user's code."""
    frames: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    kept = [entry for entry in frames if is_user_file(entry.tb_frame.f_code.co_filename)]
    generated = any(entry.tb_frame.f_code.co_filename == GENERATED for entry in frames)
    if not kept and not generated and not isinstance(error, SpmdError):
        return  # no function of the user's has raised it: all frames are needed to find out why
    traceback: TracebackType | None = None
    for entry in reversed(kept):
        traceback = TracebackType(traceback, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = traceback
    if kept[-1:] != frames[-1:] and not isinstance(error, SpmdError):
        last = kept[-1] if kept else None
        _add_note(error, f" at {os.path.basename(last.tb_frame.f_code.co_filename)}:{last.tb_lineno}" if last else "")


def _add_note(error: Exception, line: str) -> None:
    if sys.version_info >= (3, 11) and not getattr(error, "__notes__", ()):  # an outer function says no more
        error.add_note(_NOTE.format(line=line))
