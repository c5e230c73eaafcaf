"""The operator that prints: it runs on the host process of every rank, in program order, and sends nothing to others.

`host_print(values, pieces)` prints a line of text with tensors in it. It returns an empty tensor, because programs know
operators by their results; as it is declared to have an effect, no pass removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from spmd.collectives.primitive import register
from spmd.ir.effects import Effect, declare_effect
from spmd.job.process import process_index


def _global(values: list[Tensor], pieces: list[str]) -> Tensor:
    """A call outside of any program, on values that no rank holds: one process prints them."""
    if process_index() == 0:
        print_lines([(None, text_of(values, pieces))])
    return torch.empty(0)


def _not_differentiated(keyset: Any, values: list[Tensor], pieces: list[str]) -> Tensor:
    """The autograd kernel: no gradient, also in forward mode, in which `detach` would keep a tangent."""
    with torch._C._AutoDispatchBelowAutograd():
        return HOST_PRINT.redispatch(keyset & torch._C._after_autograd_keyset, values, pieces)


def _batch(info: Any, in_dims: Any, values: list[Tensor], pieces: list[str]) -> tuple[Tensor, None]:
    dims = in_dims[0] or [None] * len(values)
    moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(values, dims, strict=True)]
    return HOST_PRINT(moved, pieces), None


register(
    "host_print(Tensor[] values, str[] pieces) -> Tensor",
    lambda values, pieces: torch.empty(0),
    kernel=_global,
    autograd=_not_differentiated,
    batch=_batch,
)

HOST_PRINT: torch._ops.OpOverload = torch.ops.spmd.host_print.default
"""`host_print(values, pieces)`: `pieces` are the texts around the values and, between them, how each is formatted.

A format is the conversion, as in `str.format`, a colon, and the format specification: `"r:"`, `":.3f"`."""

declare_effect(HOST_PRINT, Effect.HOST)


def text_of(values: Sequence[Tensor], pieces: Sequence[str]) -> str:
    """The text that a call of `host_print` prints.

    >>> text_of([torch.tensor([0.25, 0.5])], ["loss ", ":.1f", "!"])
    'loss [0.2, 0.5]!'
    """
    found = [pieces[0]]
    for number, value in enumerate(values):
        found += _formatted(value, pieces[2 * number + 1]), pieces[2 * number + 2]
    return "".join(found)


_CONVERSIONS: Mapping[str, Callable[[object], str]] = MappingProxyType({"r": repr, "s": str, "a": ascii})


def _formatted(value: Tensor, form: str) -> str:
    conversion, _, spec = form.partition(":")
    if conversion:
        return format(_CONVERSIONS[conversion](value), spec)
    if spec and value.ndim:
        return f"[{', '.join(_formatted(item, form) for item in value)}]"
    return format(value, spec)


def print_lines(texts: Iterable[tuple[int | None, str]]) -> None:
    """Print texts, each line after the number of its rank; None stands for a global value, which no rank holds."""
    for rank, text in texts:
        label = "[global]" if rank is None else f"[rank {rank}]"
        for line in text.splitlines() or [""]:
            print(f"{label} {line}".rstrip())
