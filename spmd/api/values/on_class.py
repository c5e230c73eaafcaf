"""A method of a class that its instances do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OnClass:
    """A static method that instances do not have.

    Were `__tensor_unflatten__` one of theirs, `nn.Module.to` would swap tensors, which those with weak references
    refuse: a parameter is an alias of the tensor that it was made of (`spmd.api.eager.families`).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        if instance is not None:
            raise AttributeError("__tensor_unflatten__ is called on the class.")
        return self._function
