"""Records of what has used a key, for `check_keys`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from spmd.errors import SpmdError
from spmd.job.user_code import user_line

_checks: ContextVar[bool] = ContextVar("spmd_check_keys", default=False)


@contextlib.contextmanager
def check_keys(enabled: bool = True) -> Iterator[None]:
    """Raise an error where a key is used twice, in a `with` block; modelled on `jax.debug_key_reuse`.

    Two draws by one key depend on each other. A draw and `split` use a key, `fold_in` and `key_data` do not. It holds
    of an object `Key`, outside of programs and while one is traced: the key that a function under `jit`, `vmap` or
    `scan` gets is a new one each time, and so is a slice of an array of keys, and a copy.

    Raises:
        SpmdError: in the block, at the second use; it names both.

    >>> import spmd
    >>> key = spmd.random.key(0)
    >>> with check_keys():
    ...     _ = spmd.random.normal(key)
    ...     first, second = spmd.random.split(key)
    Traceback (most recent call last):
    spmd.errors.SpmdError: ...
    """
    token = _checks.set(enabled)
    try:
        yield
    finally:
        _checks.reset(token)


class Uses:
    """What has used a key, and the records of its items; they are kept while keys are checked."""

    __slots__ = ("_by", "_items")

    def __init__(self) -> None:
        self._by: str | None = None
        self._items: dict[int, Uses] = {}

    def of_item(self, indices: Sequence[object], shape: Sequence[int]) -> Uses:
        """The record of the item at a position of an array of keys; a new one for an index of another kind."""
        found = self
        for index, length in zip(indices, shape, strict=False):
            if not (_checks.get() and isinstance(index, int)):
                return Uses()
            found = found._items.setdefault(index % length, Uses())
        return found

    def add(self, name: str) -> None:
        """Record a use by a function of this name; SpmdError if it is not the first."""
        if not _checks.get():
            return
        here = f"spmd.random.{name} at {user_line()}"
        if self._by is not None:
            raise SpmdError(
                f"{here} uses a key that {self._by} has used: what they draw depends on each other. Split it before: "
                "first, second = spmd.random.split(key)."
            )
        self._by = here
