"""A mistake of a new user: a function that makes it, and what the error or warning must say."""

from __future__ import annotations

import inspect
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

import spmd

MESH = spmd.make_mesh({"data": 2, "model": 4}, runtime="virtual")
HERE = "# here"
"""Marks the line that the message or the traceback must name; without a mark it is the last one."""

INTERNALS = re.compile(
    r"aten::|c10d::|Fake|Proxy|proxy|FunctionalT|torch/_|__torch|make_fx|_functorch|site-packages|spmd/"
)


@attrs.frozen
class Mistake:
    """What a user writes, by mistake.

    Args:
        title: the mistake, in words.
        remedy: what the message must contain.
        function: makes the mistake.
    """

    title: str
    remedy: str
    function: Callable[..., Any]

    @property
    def line(self) -> str:
        """`file.py:LINE` of the mistake."""
        lines, first = inspect.getsourcelines(self.function)
        marked = [number for number, text in enumerate(lines) if HERE in text] or [len(lines) - 1]
        return f"{Path(inspect.getfile(self.function)).name}:{first + marked[0]}"


@attrs.frozen
class Seen:
    """What a user sees: the kind of an error or warning, its message with notes, and the last line of the traceback."""

    kind: str
    message: str
    line: str

    def problems(self, mistake: Mistake) -> list[str]:
        """What is wrong with it."""
        found = []
        if not self.kind:
            return ["silent"]
        if mistake.line not in (self.line, *re.findall(r"\w+\.py:\d+", self.message)):
            found.append(f"names {self.line}, not {mistake.line}")
        if mistake.remedy not in self.message:
            found.append(f"does not say {mistake.remedy!r}")
        internals = INTERNALS.findall(f"{self.kind} {self.message}")
        if internals:
            found.append(f"has internals: {internals}")
        return [f"{problem}: {self.kind}: {self.message}" for problem in found]

    @property
    def text(self) -> str:
        """The message for a page, without what depends on the place."""
        text = re.sub(r"mistakes_\w+\.py:\d+( \(`.*?`\))?(?=[ .,:;)]|$)", "step.py:12", self.message)
        text = re.sub(rf"{re.escape(tempfile.gettempdir())}/[\w./-]+", "checkpoint", text)
        text = re.sub(r"0x[0-9a-f]+", "0x...", text)
        return f"{self.kind}: {' '.join(text.split())}"


def see(mistake: Mistake, *args: Any) -> Seen:
    """Make a mistake, and return what the user sees."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            mistake.function(*args)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            message = "\n".join([str(error), *getattr(error, "__notes__", ())])
            return Seen(type(error).__name__, message, f"{Path(last.filename).name}:{last.lineno}")
    if not warned:
        return Seen("", "", "")
    first = warned[0]
    return Seen(first.category.__name__, str(first.message), f"{Path(first.filename).name}:{first.lineno}")


def collector(mistakes: list[Mistake]) -> Callable[[str, str], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """A decorator that adds a function to a list: `@mistake(title, remedy)`."""

    def mistake(title: str, remedy: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            mistakes.append(Mistake(title, remedy, function))
            return function

        return add

    return mistake


def see_all(mistakes: list[Mistake], mesh: spmd.Mesh) -> list[Seen]:
    """What each of some mistakes shows on this rank of a distributed mesh."""
    return [see(mistake, mesh) for mistake in mistakes]
