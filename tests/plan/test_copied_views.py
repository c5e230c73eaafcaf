"""Which views copy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.plan.local.copied_views import copied_views
from spmd.tracing.canonicalize.canonicalize import canonicalize
from spmd.tracing.trace import trace


@pytest.mark.parametrize(
    ("function", "copied"),
    [
        (lambda x: x.reshape(6, 4), 0),
        (lambda x: x.transpose(0, 1).reshape(6, 4), 1),
        (lambda x: x.transpose(0, 1).contiguous().view(6, 4), 1),
        (lambda x: x.transpose(0, 1).reshape(3, 2, 2, 2), 0),
        (lambda x: x.transpose(0, 1)[:, 0], 0),
        (lambda x: x.transpose(0, 1).cos().reshape(6, 4), 1),
        (lambda x: x[0].expand(5, 3, 4).reshape(15, 4), 1),
        (lambda x: (x.transpose(0, 1).reshape(6, 4), x.transpose(0, 1).reshape(2, 3, 4)), 2),
        (lambda x: torch.sort(x.transpose(0, 1), 0).values.reshape(24), 1),
    ],
)
def test_views_copy_where_strides_require_it(function: Callable[[torch.Tensor], object], copied: int) -> None:
    assert copied == len(copied_views(canonicalize(trace(function, (torch.rand(2, 3, 4),)).graph)))


def test_modes_of_the_user_see_nothing_of_it() -> None:
    seen: list[object] = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    traced = trace(lambda x: torch.sort(x.transpose(0, 1), 0).values.reshape(-1), (torch.rand(7, 11, 13),))
    graph = canonicalize(traced.graph)
    with Operators(), Functions():
        assert copied_views(graph)
    assert not seen
