"""Which line of the user's code an operator comes from."""

from __future__ import annotations

import functools
import linecache
import sys
from types import CodeType, FrameType

import attrs
import torch

from spmd.ir.graph import Source
from spmd.user_code import is_user_file


@functools.lru_cache(maxsize=65536)
def source_at(file: str, line: int) -> Source:
    """The source of a line, with its text."""
    return Source(file, line, linecache.getline(file, line).strip())


@functools.lru_cache(maxsize=65536)
def as_backward(source: Source) -> Source:
    """The same line, as the origin of a backward operator."""
    return attrs.evolve(source, backward=True)


def user_source(boundary: CodeType | None = None) -> Source | None:
    """The innermost frame of the user's on the stack; None if `boundary` comes first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not boundary:
        if is_user_file(frame.f_code.co_filename) and "__name__" in frame.f_globals:  # not what torch has generated
            return source_at(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


class SourceTracker:
    """Finds the line of every operator of one trace; a backward operator gets that of its forward.

    Autograd numbers its nodes in order of creation, and a node exists before its forward operator is dispatched. So
    the numbers that are new when an operator arrives are those of its nodes (one for each level of `torch.func.grad`),
    and the node that autograd executes leads back to the forward operator.
    """

    def __init__(self, boundary: CodeType) -> None:
        self._boundary = boundary
        self._by_sequence: dict[int, Source] = {}
        self._seen = torch._C._autograd._get_sequence_nr()

    def current(self) -> Source | None:
        """The source of the operator that is being dispatched."""
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        source = None
        if node is not None:
            source = self._by_sequence.get(node._sequence_nr())
            source = None if source is None else as_backward(source)
        if source is None:
            source = user_source(self._boundary)
        self._remember(source)
        return source

    def _remember(self, source: Source | None) -> None:
        upcoming = torch._C._autograd._get_sequence_nr()
        if source is not None:
            for number in range(self._seen, upcoming):
                self._by_sequence[number] = source
        self._seen = upcoming
