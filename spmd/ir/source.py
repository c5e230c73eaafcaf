"""Lines of the user's code."""

from __future__ import annotations

import os

import attrs


@attrs.frozen
class Source:
    """The line of the user's code that an operation comes from; a backward operation has that of its forward one."""

    file: str
    line: int
    code: str = ""
    backward: bool = False

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}{' (backward)' if self.backward else ''}"
