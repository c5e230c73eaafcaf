"""The fastest way to call an operator of torch from Python.

`torch.ops` matches arguments against a schema at each call; torch's generated functions (`torch.add`) parse them in
half the time. But a function chooses an overload by itself, so it is taken for a call only if it
reaches the same operators with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from spmd.core.spec import TensorMeta
from spmd.ir.graph import freeze, iterate_leaves, map_leaves

_C: Any = torch._C
_FUNCTIONS = (_C._VariableFunctions, _C._nn, _C._linalg, _C._fft, _C._special, _C.TensorBase)
"""Where torch's functions and methods are, by the names of their operators."""


def callable_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """A function that does what an operator does in calls like the given one.

    Args:
        op: an operator, or a Python function, which is returned.
        args, kwargs: the arguments of a call; tensors are `TensorMeta`s. Calls are like it if their tensors have these
            dtypes and numbers of dims, and their other arguments these types: that decides which overload is chosen.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return op  # type: ignore[no-any-return]
    arguments = tuple(args), dict(kwargs)
    return _find(_BoundCall(op, _kinds(arguments), arguments)) or op._op


def _kinds(tree: Any) -> Any:
    """What decides which overload a function chooses for arguments, as a hashable key."""
    if isinstance(tree, (tuple, list)):
        return type(tree), *map(_kinds, tree)
    if isinstance(tree, dict):
        return tuple((name, _kinds(value)) for name, value in tree.items())
    return (tree.ndim, tree.dtype) if isinstance(tree, TensorMeta) else type(tree)


@attrs.frozen
class _BoundCall:
    """A call, to be compared by its operator and the kinds of its arguments, and the arguments."""

    op: torch._ops.OpOverload
    kinds: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = attrs.field(eq=False)


@lru_cache(maxsize=4096)
def _find(call: _BoundCall) -> Callable[..., Any] | None:
    """Torch's function for a call of an operator; None if there is none."""
    name = call.op._schema.name.removeprefix("aten::")
    function = next((getattr(module, name) for module in _FUNCTIONS if hasattr(module, name)), None)
    leaves = list(iterate_leaves(call.arguments))
    on_meta = any(isinstance(leaf, TensorMeta) for leaf in leaves)
    if function is None or not on_meta or any(isinstance(leaf, torch.device) for leaf in leaves):
        return None  # to try it would take memory
    try:
        wanted, found = _Reached.by(call.op._op, *call.arguments), _Reached.by(function, *call.arguments)
    except Exception:  # an operator that has no kernel for meta tensors, or an argument that the function does not take
        return None
    return function if wanted == found else None


class _Reached(TorchDispatchMode):
    """Records the operators that a function reaches, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @classmethod
    def by(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """What a function reaches that is called on tensors without data, and which of its results are None."""

        def tensor(leaf: Any) -> Any:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, TensorMeta) else leaf

        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            args, kwargs = map_leaves(tensor, (args, kwargs))
            with cls() as mode:
                results = list(iterate_leaves(function(*args, **kwargs)))
        return [*mode.calls, [leaf is None for leaf in results]]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meta = lambda leaf: TensorMeta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        self.calls.append((op, freeze(map_leaves(meta, (tuple(args), kwargs or {})))))
        return op(*args, **(kwargs or {}))
