"""The leaves of what loops and branches take and return: tensors, and Python's numbers, which become tensors."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from spmd.core.pytree import leaf_remedy, structure_text, tree_flatten, tree_leaves
from spmd.core.spec import TensorMeta
from spmd.core.value_types import NUMBERS, is_integer
from spmd.errors import TraceError
from spmd.tracing.source import where

WEAK = (*NUMBERS, torch.SymFloat)
"""Types of numbers whose dtype gives way, as that of JAX's weakly typed values."""


@attrs.frozen(eq=False)
class Leaves:
    """A pytree of tensors and numbers.

    Args:
        values: the leaves.
        structure: the structure of the tree.
    """

    values: tuple[Any, ...]
    structure: optree.PyTreeSpec

    @property
    def paths(self) -> list[str]:
        """The path of each leaf, as Python indexes it."""
        return [accessor.codify("") for accessor in self.structure.accessors()]

    def tensors(self, device: torch.device | None) -> list[Tensor]:
        """The leaves as tensors, numbers on a device."""
        return [as_tensor(value, device) for value in self.values]

    def metas(self, device: torch.device | None) -> Leaves:
        """The metas of the leaves, as tensors on a device, in a tree of the same structure."""
        return Leaves(tuple(map(TensorMeta.of, self.tensors(device))), self.structure)

    @property
    def text(self) -> str:
        """The tree as shown in messages."""
        return structure_text(self.structure.unflatten(self.values))


def have(tensors: Sequence[Tensor], metas: Sequence[TensorMeta]) -> bool:
    """Whether tensors have some metas; cheaper than to make theirs, in each trip of a loop."""
    pairs = zip(tensors, metas, strict=True)
    return all(tensor.dtype is meta.dtype and tensor.shape == meta.shape for tensor, meta in pairs)


def difference(metas: Leaves, others: Leaves) -> tuple[str, str] | None:
    """What two trees of metas are where they first differ, in words: their structures, or a leaf; None if equal."""
    if metas.structure != others.structure:
        alike = " with other values in fields that are no tensors" if metas.text == others.text else ""
        return metas.text, f"{others.text}{alike}"
    for path, meta, other in zip(metas.paths, metas.values, others.values, strict=True):
        if meta != other:
            return f"{meta} at {path}" if path else str(meta), str(other)
    return None


def leaves_of(tree: Any, call: str, name: str) -> Leaves:
    """The leaves of a tree.

    Args:
        tree: any pytree.
        call: the function that the user calls, for messages: `spmd.scan`.
        name: what the tree is.

    Raises:
        TraceError: a leaf is neither a tensor nor a number.
    """
    values, structure = tree_flatten(tree)
    found = Leaves(tuple(values), structure)
    for number, value in enumerate(values):
        if not isinstance(value, (Tensor, *WEAK)):
            got = f"{type(value).__name__} {value!r:.60}"
            raise TraceError(
                f"{call} at {where()}: {name}{found.paths[number]} must be a tensor or a number (got {got}). "
                f"{leaf_remedy(value)}"
            )
    return found


def as_tensor(value: Any, device: torch.device | None) -> Tensor:
    """A leaf as a tensor; a number has int64, bool, or torch's default dtype of floats or complex numbers."""
    return value if isinstance(value, Tensor) else torch.tensor(value, device=device)


def check_callable(call: str, functions: Sequence[tuple[str, Any]]) -> None:
    """TraceError for an argument, given with its name, that is no function."""
    for name, function in functions:
        if not callable(function):
            got = f"{type(function).__name__} {function!r:.60}"
            raise TraceError(f"{call} at {where()}: {name} must be a function (got {got}).")


def device_of(*trees: Any) -> torch.device | None:
    """The device of the first tensor in some trees; None if there is none."""
    return next((leaf.device for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)), None)


def integer_scalar(value: Any, call: str, name: str) -> int | Tensor:
    """An integer, or a 0-d tensor of integers.

    Raises:
        TraceError: it is neither; `name` says what it is.
    """
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    if isinstance(value, Tensor):
        fits = not value.ndim and is_integer(value.dtype)
    if not fits:
        got = TensorMeta.of(value) if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.60}"
        raise TraceError(f"{call} at {where()}: {name} must be an integer or a 0-d tensor of integers (got {got}).")
    return value if isinstance(value, Tensor) else int(value)
