"""A store of torch.distributed that counts what is asked of it, by Python and by torch's backends."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_STORES: list[CountedStore] = []
"""All of them, because torch would keep the C++ half of one only."""


class CountedStore(dist.Store):
    """A store that passes all operations on to another one.

    Args:
        store: the other one.
        operations: their numbers so far, by name; clones count there, too.
    """

    def __init__(self, store: Any, operations: Counter[str]) -> None:
        super().__init__()
        self._store, self.operations = store, operations
        _STORES.append(self)

    def _call(self, name: str, *args: Any) -> Any:
        self.operations[name] += 1
        return getattr(self._store, name)(*args)

    def clone(self) -> CountedStore:
        """Another connection to the same store."""
        return CountedStore(self._store.clone(), self.operations)

    def set(self, key: str, value: Any) -> None:
        """As that of torch, and so are the others."""
        self._call("set", key, value)

    def get(self, key: str) -> Any:
        """See torch."""
        return self._call("get", key)

    def add(self, key: str, amount: int) -> int:
        """See torch."""
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        """See torch."""
        return self._call("compare_set", key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        """See torch."""
        return bool(self._call("check", keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See torch."""
        self._call("wait", keys, *([] if timeout is None else [timeout]))

    def append(self, key: str, value: Any) -> None:
        """See torch."""
        self._call("append", key, value)

    def multi_get(self, keys: list[str]) -> Any:
        """See torch."""
        return self._call("multi_get", keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """See torch."""
        self._call("multi_set", keys, values)

    def delete_key(self, key: str) -> bool:
        """See torch."""
        return bool(self._call("delete_key", key))

    def has_extended_api(self) -> bool:
        """See torch; it asks nothing of the server."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """See torch; it asks nothing of the server."""
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)
