"""Random arguments of calls of operators: what the modules of calls are written with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

Calls: TypeAlias = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]

_generator = torch.Generator().manual_seed(0)


def f(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=dtype)


def i(bound: int, *shape: int) -> torch.Tensor:
    return torch.randint(bound, shape, generator=_generator)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator) > 0.5


def call(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    return args, kwargs


def each(ops: Sequence[torch._ops.OpOverload], make: Callable[[], Calls]) -> dict[torch._ops.OpOverload, Calls]:
    return {op: make() for op in ops}
