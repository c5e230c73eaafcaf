"""Random arguments for the calls of operators in this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch

Calls: TypeAlias = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@attrs.frozen
class Draws:
    """Random tensors from its own generator: `f` of floats, `i` of integers below a bound, `b` of booleans."""

    generator: torch.Generator = attrs.field(converter=_seeded)

    def f(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=dtype)

    def i(self, bound: int, *shape: int) -> torch.Tensor:
        return torch.randint(bound, shape, generator=self.generator)

    def b(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) > 0.5


def call(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    return args, kwargs


def each(ops: Sequence[torch._ops.OpOverload], make: Callable[[], Calls]) -> dict[torch._ops.OpOverload, Calls]:
    return {op: make() for op in ops}
