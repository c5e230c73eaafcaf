"""The dtypes of the operands of products, which torch's meta kernels do not check."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

aten = torch.ops.aten

_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.mv.default,
        aten.dot.default,
        aten.addmm.default,
        aten.addmv.default,
        aten.baddbmm.default,
    }
)


def check_products(func: Any, args: tuple[Any, ...]) -> None:
    """Raise torch's own error for a product of operands of different dtypes, where the user's line is on the stack."""
    if func not in _PRODUCTS or len({x.dtype for x in args if isinstance(x, torch.Tensor)}) < 2:
        return
    with no_dispatch():
        func(*[torch.empty([1] * x.ndim, dtype=x.dtype) if isinstance(x, torch.Tensor) else x for x in args])
