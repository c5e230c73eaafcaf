"""Results that must be alike: of the trips of a loop, or of the branches of one choice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spmd.api.control_flow.leaves import Leaves, difference, have, leaves_of
from spmd.errors import SpmdError, TraceError
from spmd.tracing.running import running
from spmd.tracing.source import where
from spmd.tracing.trace import trace


class Results:
    """What several calls of functions return: each has the structure, shapes and dtypes of the first.

    Args:
        call: the loop or the choice, for messages: `spmd.cond`.
        device: of tensors that are made of numbers.
    """

    def __init__(self, call: str, device: torch.device | None) -> None:
        self._call, self._device = call, device
        self._first: tuple[str, Leaves] | None = None

    def tensors(self, tree: Any, name: str) -> list[Tensor]:
        """The leaves of a result, with numbers as tensors; `name` says what has returned it: `true_fun`.

        Raises:
            TraceError: it is not like the first one.
        """
        found = leaves_of(tree, self._call, f"the result of {name}")
        tensors = found.tensors(self._device)
        first = None if self._first is None else self._first[1]
        if first is None or found.structure != first.structure or not have(tensors, first.values):
            self._compare(found.metas(self._device), name)
        return tensors

    def compare_traces(self, functions: Sequence[tuple[str, Callable[..., Any]]], operands: Sequence[Any]) -> None:
        """Trace functions, each with its name, to compare their results, as all but one of them will not run.

        What cannot be traced, as a function that reads a value, is not compared.

        Raises:
            TraceError: results differ.
        """
        if running() is not None:  # a trace does it, and nothing is traced under disable_jit
            return
        for name, function in functions:
            seen: list[Leaves] = []
            try:
                trace(functools.partial(self._note, seen, name, function), tuple(operands))
            except SpmdError:
                continue
            self._compare(seen[0], name)

    def _note(self, seen: list[Leaves], name: str, function: Callable[..., Any], *operands: Any) -> None:
        seen.append(leaves_of(function(*operands), self._call, f"the result of {name}").metas(self._device))

    def _compare(self, metas: Leaves, name: str) -> None:
        """TraceError if a result is not like the first one, which this is if there is none yet."""
        if self._first is None:
            self._first = (name, metas)
        first, others = self._first
        found = difference(metas, others)
        if found is not None:
            raise TraceError(
                f"{self._call} at {where()}: {name} returns {found[0]}, and {first} returns {found[1]}"
                f"{' in another trip' if name == first else ''}. All results must have one structure, with the same "
                "shapes and dtypes."
            )

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """The tree of results, of the structure that calls had."""
        assert self._first is not None, "no function was called"
        return self._first[1].structure.unflatten(tensors)
