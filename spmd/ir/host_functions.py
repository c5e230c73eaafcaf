"""Host functions: functions of the user's that a program calls with values, which are no operators of torch.

An operator takes no Python object, so it gets the number of a host function. A host function lives as long as somebody
refers to it: first the call that makes it, then the programs, in which its number is a `Handle`.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Sequence
from types import BuiltinMethodType, MethodType
from typing import Any

import attrs
import optree
import torch

from spmd.core.modules import Same
from spmd.core.pytree import tree_flatten
from spmd.core.spec import TensorMeta
from spmd.core.static_key import static_key


class Passed(enum.Enum):
    """Stands for an argument that a program passes: a tensor, or a Python number as a tensor."""

    TENSOR = "tensor"
    NUMBER = "number"


_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, HostFunction] = weakref.WeakValueDictionary()
_by_key: weakref.WeakValueDictionary[Any, HostFunction] = weakref.WeakValueDictionary()


@attrs.frozen(eq=False)
class HostFunction:
    """A function of the user's, with its arguments but for the tensors among them.

    Args:
        function: the function.
        structure: the structure of its positional and keyword arguments.
        leaves: their leaves; a `Passed` for each that a program passes.
        results: the shapes and dtypes of its results.
        result_structure: the structure of its results.
        vmap_method: how it is batched.
        number: its number.
    """

    function: Callable[..., Any]
    structure: optree.PyTreeSpec
    leaves: tuple[Any, ...]
    results: tuple[TensorMeta, ...] = ()
    result_structure: optree.PyTreeSpec | None = None
    vmap_method: str | None = None
    number: int = attrs.field(init=False, factory=_numbers.__next__)

    def __attrs_post_init__(self) -> None:
        _known[self.number] = self

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Any, kwargs: Any, **options: Any
    ) -> tuple[HostFunction, list[torch.Tensor]]:
        """The host function of a call, and what a program passes to it; one object for equal calls."""
        given, structure = tree_flatten((args, kwargs))
        tensors = [_as_tensor(leaf) for leaf in given if isinstance(leaf, (torch.Tensor, torch.SymFloat))]
        leaves = tuple(map(_without_value, given))
        try:
            key = _identity(function), structure, static_key(leaves), *options.values()
            found = _by_key.get(key)
            if found is None:
                found = _by_key[key] = cls(function, structure, leaves, **options)
        except TypeError:  # an argument that is not hashable
            found = cls(function, structure, leaves, **options)
        return found, tensors

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call it with copies on the CPU: a program may write to the memory of a tensor after its last use."""
        given = iter(tensors)
        copy = {Passed.TENSOR: lambda x: x.detach().to("cpu", copy=True), Passed.NUMBER: torch.Tensor.item}
        with torch.no_grad():
            leaves = [copy[leaf](next(given)) if isinstance(leaf, Passed) else leaf for leaf in self.leaves]
        args, kwargs = self.structure.unflatten(leaves)
        return self.function(*args, **kwargs)


def _identity(function: Callable[..., Any]) -> Any:
    """A key of a function: methods are new objects, other callables may define equality."""
    return function if isinstance(function, (MethodType, BuiltinMethodType)) else Same(function)


def _as_tensor(leaf: Any) -> torch.Tensor:
    return leaf if isinstance(leaf, torch.Tensor) else torch.ops.aten.scalar_tensor.default(leaf, dtype=torch.float64)


def _without_value(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return Passed.TENSOR
    return Passed.NUMBER if isinstance(leaf, torch.SymFloat) else leaf


def host_function(number: int) -> HostFunction:
    """The host function of a number."""
    return _known[number]


class Handle(int):
    """The number of a host function in a program, which keeps it alive.

    Its text is the function's name and its place among those of the program: ranks compare programs by their text, and
    numbers may differ between ranks.
    """

    function: HostFunction
    place: int

    @classmethod
    def of(cls, number: int, place: int) -> Handle:
        """The handle of a host function."""
        made = cls(number)
        made.function, made.place = host_function(number), place
        return made

    def __repr__(self) -> str:
        return f"{self.function.name}#{self.place}"
