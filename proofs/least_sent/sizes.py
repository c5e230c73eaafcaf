"""Sizes of the tensors of torch's operator database, other than its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def even_sizes(ranks: int) -> Iterator[None]:
    """Give the database's tensors dims that so many ranks divide, where its sample functions take their constants.

    Each module of the database has copies of the constants.
    """
    small = max(4, ranks)
    sizes = {"XS": ranks, "S": small, "M": 2 * small, "L": 4 * small}
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.testing._internal.") and isinstance(getattr(module, "S", None), int):
                values = {constant: value for constant, value in sizes.items() if hasattr(module, constant)}
                stack.enter_context(mock.patch.dict(vars(module), values))
        yield
