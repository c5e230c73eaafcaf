"""Blocks: the unit in which a dim is sharded, where it is a product of lengths of which the first is sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_block: ContextVar[int] = ContextVar("spmd_block", default=1)


@contextlib.contextmanager
def sharded_in_blocks(size: int) -> Iterator[None]:
    """A context in which `shard_offset` is that of chunks of whole blocks of this size."""
    token = _block.set(size)
    try:
        yield
    finally:
        _block.reset(token)


def block_size() -> int:
    """The size of the blocks that the sharded dim is made of; 1 if it is sharded between any elements."""
    return _block.get()
