"""The tensors that programs start from, as data: their values and their memory layout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum

import attrs
import torch


class Kind(str, Enum):
    """The kind of values of a tensor."""

    FLOAT = "float64"
    COMPLEX = "complex128"
    INT = "int64"
    BOOL = "bool"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kind | None:
        """The kind of a tensor; None for other dtypes."""
        return _KINDS.get(tensor.dtype)


_KINDS = {getattr(torch, kind.value): kind for kind in Kind}


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of a new tensor, also of dims of length 1: some kernels depend on these, too."""
    return tensor.clone(memory_format=torch.contiguous_format)


class Layout(str, Enum):
    """The memory layout of a tensor."""

    CONTIGUOUS = "contiguous"
    PERMUTED = "permuted"
    STEPPED = "stepped"
    NARROWED = "narrowed"
    EXPANDED = "expanded"
    CHANNELS_LAST = "channels last"


@attrs.frozen
class Recipe:
    """A tensor as an expression.

    Args:
        kind: the kind of its values.
        shape: its shape.
        layout: its memory layout.
        dim: the dim that `layout` refers to.
        seed: the seed of its values.
    """

    kind: Kind
    shape: tuple[int, ...]
    layout: Layout = Layout.CONTIGUOUS
    dim: int = 0
    seed: int = 0

    def text(self) -> str:
        """The expression; `g` stands for a `torch.Generator`."""
        shape, dim = list(self.shape), self.dim
        if self.layout is Layout.PERMUTED:
            last = shape.pop()
            return f"{self._values([*shape[:dim], last, *shape[dim:]])}.movedim({dim}, -1)"
        if self.layout is Layout.STEPPED:
            shape[dim] *= 2
            return f"{self._values(shape)}[{':, ' * dim}::2]"
        if self.layout is Layout.NARROWED:
            shape[dim] += 2
            return f"{self._values(shape)}.narrow({dim}, 1, {self.shape[dim]})"
        if self.layout is Layout.EXPANDED:
            shape[dim] = 1
            return f"{self._values(shape)}.expand({sizes(self.shape)})"
        if self.layout is Layout.CHANNELS_LAST:
            return f"{self._values(shape)}.contiguous(memory_format=torch.channels_last)"
        return self._values(shape)

    def _values(self, shape: Sequence[int]) -> str:
        generator = f"generator=g.manual_seed({self.seed})"
        if self.kind is Kind.FLOAT:
            return f"torch.randn({sizes(shape)}, {generator})"
        if self.kind is Kind.COMPLEX:
            return f"torch.randn({sizes(shape)}, dtype=torch.complex128, {generator})"
        if self.kind is Kind.INT:
            return f"torch.randint(-5, 6, {tuple(shape)}, {generator})"
        return f"torch.randint(0, 2, {tuple(shape)}, {generator}).bool()"

    def relaid(self, rng: random.Random, contiguous: float = 0.35) -> Recipe:
        """The same tensor in a random layout, which is contiguous with probability `contiguous`."""
        if not self.shape or rng.random() < contiguous:
            return attrs.evolve(self, layout=Layout.CONTIGUOUS)
        layouts = [Layout.STEPPED, Layout.NARROWED, Layout.EXPANDED]
        layouts += [Layout.PERMUTED] * 4 if len(self.shape) > 1 else []
        layouts += [Layout.CHANNELS_LAST] * 3 if len(self.shape) == 4 else []
        layout = rng.choice(layouts)
        last = len(self.shape) - (2 if layout is Layout.PERMUTED else 1)
        return attrs.evolve(self, layout=layout, dim=rng.randint(0, last))


def sizes(shape: Sequence[int]) -> str:
    """A shape as the text of a factory's arguments."""
    return ", ".join(map(str, shape)) if shape else "()"


def nudged(tensor: torch.Tensor) -> torch.Tensor:
    """A floating-point tensor with changed last digits and the same strides; other tensors unchanged."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return tensor
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((last + 1,), (1,))
    noise = torch.arange(memory.numel(), dtype=torch.float64).mul(37.0).cos().mul(NUDGE)
    return (memory + noise).as_strided(tensor.shape, tensor.stride(), 0)


NUDGE = 1e-10
"""The largest change of a number by `nudged`."""


def agrees(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors have one shape and dtype, and differ by at most `tolerance` of the largest value or of 1."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(actual, expected)
    if not expected.numel():
        return True
    scale = expected.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(actual, expected, rtol=0.0, atol=tolerance * max(1.0, scale), equal_nan=True)


def random_shape(rng: random.Random, ndim: int, largest: int = 5) -> tuple[int, ...]:
    """A small random shape, rarely with an empty dim."""
    return tuple(0 if rng.random() < _EMPTY else rng.randint(1, largest) for _ in range(ndim))


_EMPTY = 0.012  # the probability that a dim has length 0
