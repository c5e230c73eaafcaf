"""Whether lists and dicts in attributes hold what they held: they may change in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from spmd.core.generated import define

DEPTH, _ITEMS = 3, 64  # containers in containers, and items, of which changes are looked for


def contents_of(values: Iterable[Any]) -> list[Any]:
    """The lists and dicts among some values and in them, without those that are large or hold tensors.

    >>> contents_of([[1], ({"a": [2]}, 3)])
    [[1], {'a': [2]}, [2]]
    """
    found: dict[int, Any] = {}
    level = list(values)
    for _ in range(DEPTH):
        level = [value for value in level if type(value) in (list, tuple, dict) and len(value) <= _ITEMS]
        found |= {id(value): value for value in level if type(value) is not tuple}
        level = [item for value in level for item in _items(value)]
    return [value for value in found.values() if not any(isinstance(x, torch.Tensor) for x in _items(value))]


def contents_checker(containers: Iterable[Any]) -> Callable[[], bool]:
    """A function that says whether lists and dicts have the items that they have now, generated for speed.

    >>> sizes = {"hidden": 8}
    >>> unchanged = contents_checker([sizes])
    >>> sizes["hidden"] = 16
    >>> unchanged()
    False
    """
    space: dict[str, Any] = {}
    tests = []
    for container in containers:
        space[name := f"c{len(space)}"] = container
        tests.append(f"len({name}) == {len(container)}")
        for key, item in container.items() if type(container) is dict else enumerate(container):
            space[known := f"k{len(space)}"] = key
            space[held := f"i{len(space)}"] = item
            tests.append(f"{name}[{known}] is {held}")
    lines = ["def unchanged():", "    try:", f"        return {' and '.join(tests) or 'True'}"]
    lines += ["    except (KeyError, IndexError):", "        return False"]
    return define("unchanged", lines, space, "<spmd contents>")


def _items(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value
