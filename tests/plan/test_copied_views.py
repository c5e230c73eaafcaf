"""Which views copy."""

from collections.abc import Callable

import pytest
import torch

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
