"""The values of real tensors, as a trace has them of fake ones: what the types of a shard_map body are kept by.

In-place operators and views make several tensors of one memory, so a type belongs to memory: to a storage, which is
known by a weak reference. A cast returns a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch._C._functorch import (
    get_interpreter_stack,
    is_functorch_wrapped_tensor,
    maybe_get_level,
)
from torch.multiprocessing.reductions import StorageWeakRef

from spmd.api.uncompiled.rank import Rank
from spmd.collectives.axis_types import AxisType
from spmd.core.mesh import Coordinate
from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.ir.graph import Operation, Value, iterate_leaves, map_leaves
from spmd.ir.names import Namer
from spmd.ir.source import Source
from spmd.ir.variants import Unevenness
from spmd.tracing.active_transforms import unwrapped
from spmd.tracing.running import Observer
from spmd.tracing.source import where

_ALIAS = torch.ops.aten.alias.default


@attrs.define(eq=False)
class _Memory:
    """A storage: the value that was written last, and the values of all its views since then, by their metas."""

    storage: StorageWeakRef
    written: Value
    views: dict[TensorMeta, Value]


class RankTrace:
    """What is known of the tensors of one rank's function while it runs; takes the place of a trace.

    Args:
        rank: the rank.

    Attributes:
        operations: the operators that ran, for messages; without tensors.
        observer, unevenness, in_backward, functions: as those of a trace.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.operations: list[Operation] = []
        self.observer: Observer | None = None
        self.unevenness: Unevenness | None = None
        self.functions: list[str] = []
        self.in_backward: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._namer = Namer()
        self._known: dict[int, _Memory] = {}
        self._swept = 1024

    @property
    def recorder(self) -> RankTrace:
        """Itself: it records."""
        return self

    @property
    def coordinate(self) -> Coordinate:
        """The coordinate of the rank."""
        return self.rank.coordinate

    def lift(self, tensor: Tensor) -> Tensor:
        """The tensor: those from outside are like all others here."""
        return tensor

    take = lift

    def cast(self, leaf: Tensor, casts: Sequence[tuple[str, AxisType]]) -> None:
        """None: casts are made where they stand."""

    def gather(self, value: Any) -> list[Any]:
        """The Python values of all ranks, at the end of a body."""
        return self.rank.gather("ends the body of shard_map", value)

    def value(self, tensor: Tensor) -> Value:
        """The value that a tensor has now, under transforms too."""
        refuse_transformed(tensor)
        tensor = unwrapped(tensor)
        meta = TensorMeta.of(tensor)
        memory = self._memory(tensor)
        if memory is None:
            return self._bind(tensor, Value(self._namer.fresh("constant"), meta))
        if meta not in memory.views:
            memory.views[meta] = Value(self._namer.fresh("view"), meta)
            self._add(Operation(_ALIAS, (memory.written,), {}, (memory.views[meta],)))
        return memory.views[meta]

    def record(self, op: Any, arguments: tuple[Any, Any], outputs: Any, source: Source | None) -> None:
        """Record an operator that has run.

        Args:
            op: the operator.
            arguments: its arguments and keyword arguments, as `values_of` returned them before it ran.
            outputs: what it returned.
            source: the user's line.
        """
        tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in iterate_leaves(outputs)]
        results = [None if x is None else Value(self._namer.fresh("x"), TensorMeta.of(x)) for x in tensors]
        if not any(results):
            return
        self._add(Operation(functional(op), *arguments, tuple(results), source))
        for x, value in zip(tensors, results, strict=True):
            if x is None or value is None:
                continue
            memory = self._memory(x)
            if memory is None or op._schema.is_mutable:
                self._bind(x, value)
            else:
                memory.views[value.meta] = value

    def values_of(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of an operator with values in place of tensors."""
        take = lambda leaf: self.value(leaf) if isinstance(leaf, Tensor) else leaf  # noqa: E731
        return map_leaves(take, tuple(args)), map_leaves(take, dict(kwargs))

    def _add(self, operation: Operation) -> None:
        self.operations.append(operation)
        if self.observer is not None:
            self.observer.add(operation)

    def _memory(self, tensor: Tensor) -> _Memory | None:
        return self._known.get(_storage(tensor)._cdata)

    def _bind(self, tensor: Tensor, value: Value) -> Value:
        if len(self._known) > self._swept:
            self._known = {key: memory for key, memory in self._known.items() if not memory.storage.expired()}
            self._swept = 2 * len(self._known) + 1024
        storage = _storage(tensor)
        # The weak reference keeps the address of the storage from being used again, not its elements.
        self._known[storage._cdata] = _Memory(StorageWeakRef(storage), value, {value.meta: value})
        return value


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of a tensor itself: function modes would take that of its cast."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def functional(op: Any) -> Any:
    """The operator that computes what an in-place operator writes; itself if there is none."""
    if not op._schema.is_mutable:
        return op
    name = op._schema.name.split("::")[-1]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return getattr(packet, op._overloadname, op)


def refuse_transformed(leaf: Any) -> None:
    """TraceError for a tensor on which a transform acts that is outside of the function that runs."""
    if not isinstance(leaf, Tensor) or not is_functorch_wrapped_tensor(leaf):
        return
    if maybe_get_level(leaf) > len(get_interpreter_stack() or ()):
        raise TraceError(
            f"A function closes over a tensor on which a transform from outside acts, at {where()}. Pass it as an "
            "argument."
        )
