"""Lines of the user's code."""

from __future__ import annotations

import os

import attrs


@attrs.frozen
class Range:
    """A range of `torch.profiler`: its name, a number that tells it from others, and whether it is a collective's."""

    name: str
    number: int
    is_collective: bool = False


@attrs.frozen
class Source:
    """The line of the user's code that an operation comes from; a backward operation has that of its forward one.

    `ranges` are the `torch.profiler.record_function` blocks that it ran in, the outermost first.
    """

    file: str
    line: int
    code: str = ""
    backward: bool = False
    ranges: tuple[Range, ...] = attrs.field(default=(), eq=False)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}{' (backward)' if self.backward else ''}"
