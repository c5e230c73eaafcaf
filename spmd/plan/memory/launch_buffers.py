"""The buffers that a rank allocates for the collectives of one launch.

They are found by what runs (`spmd.collectives.distributed`): its functions that pack operands and unpack results, on
meta tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.collectives.distributed.bucket import Bucket
from spmd.collectives.distributed.exchange import bind
from spmd.collectives.primitives import COLLECTIVES
from spmd.collectives.transport.exchange import Exchange
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.spec import TensorMeta
from spmd.ir.graph import iterate_leaves
from spmd.plan.local.strided import Strided, StridedCall, storage_of

Allocation: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The numbers of the buffers that an operator reads, and of those that it allocates."""


@attrs.frozen
class LaunchBuffers:
    """The buffers of a launch, by their numbers.

    Args:
        metas: of each buffer, which is flat; the first are those of the operands.
        packing: what is allocated before it starts.
        sent, received: the buffers of the launch itself.
        unpacking: what is allocated after it has been waited for.
        results: the buffer of each result.
        holds_sent: whether the buffer that is sent is held until then.
    """

    metas: tuple[TensorMeta, ...]
    packing: tuple[Allocation, ...]
    sent: int
    received: int
    unpacking: tuple[Allocation, ...]
    results: tuple[int, ...]
    holds_sent: bool


@lru_cache(maxsize=4096)
def launch_buffers(mesh: Mesh, ranks: tuple[Coordinate, ...], calls: tuple[StridedCall, ...]) -> LaunchBuffers:
    """The buffers of a launch.

    Args:
        mesh: the mesh.
        ranks: the mesh coordinates of the ranks that run it with operands of these shapes; they differ in what they
            send and receive in permutations only.
        calls: the calls of primitives that are launched as one.
    """
    if COLLECTIVES[calls[0].form.op].sizes_are_data:
        return _ragged(*calls)
    if mesh.axis_size(calls[0].form.args[-1]) == 1:
        return _alone(*calls)
    parts = {call: _part(mesh, ranks, call) for call in dict.fromkeys(calls)}
    bound = [parts[call].bound for call in calls]
    run = bound[0] if len(bound) == 1 else Bucket.of(bound)
    operands = [call.operands[0].tensor() for call in calls]
    storages = _Storages(operands)
    with storages:
        packed = run.pack(*operands)
    packing = storages.taken()
    received = run.received(packed)
    numbers = storages.number(packed), storages.number(received)
    with storages:
        rows = run.rows(received) if isinstance(run, Bucket) else (received,)
    found = tuple(storages.unpacked(parts[call], row) for call, row in zip(calls, rows, strict=True))
    metas = tuple(storages.metas)
    return LaunchBuffers(metas, packing, *numbers, storages.taken(), found, run.in_place is None)


@lru_cache(maxsize=4096)
def _part(mesh: Mesh, ranks: tuple[Coordinate, ...], call: StridedCall) -> _Part:
    """The part of a launch that is one call."""
    *rest, axes = call.form.args[1:]
    busiest = COLLECTIVES[call.form.op].busiest([mesh.axis_index(rank, axes) for rank in ranks], *rest)
    found = bind(call.form.op, mesh, ranks[0], call.operands[0].meta, (*busiest, axes), communicates=False)
    assert isinstance(found, Exchange)
    return _Part(found)


class _Part:
    """One call of a launch, and what it allocates to unpack its result, by the row of the buffer that it received."""

    def __init__(self, bound: Exchange) -> None:
        self.bound = bound
        self._unpacking: dict[Strided, tuple[Sequence[TensorMeta], tuple[Allocation, ...], int]] = {}

    def unpacking(self, row: torch.Tensor) -> tuple[Sequence[TensorMeta], tuple[Allocation, ...], int]:
        """Buffers, of which that with the row is the first, allocations, and the buffer of the result."""
        apart = row.ndim == 2 and row.stride(0) > row.shape[1]  # how far does not matter to any operator
        key = Strided(TensorMeta.of(row), (2 * row.shape[1], 1) if apart else row.stride())
        if key not in self._unpacking:
            received = key.tensor()
            storages = _Storages([received])
            with storages:
                result = storages.number(self.bound.unpack(received))
            self._unpacking[key] = storages.metas, storages.taken(), result
        return self._unpacking[key]


def _ragged(call: StridedCall) -> LaunchBuffers:
    """Those of an exchange whose sizes are known when it runs: all rows are sent and received."""
    (rows, table), (result,) = (operand.meta for operand in call.operands), call.results
    metas = tuple(map(_flat, (rows, table, rows, result, result)))
    return LaunchBuffers(metas, (((0, 1), (2,)),), 2, 3, (((3,), (4,)),), (4,), holds_sent=True)


def _alone(call: StridedCall) -> LaunchBuffers:
    """Those in a group of one rank: a copy of its operand."""
    metas = tuple(map(_flat, (call.operands[0].meta, *call.results)))
    return LaunchBuffers(metas, (((0,), (1,)),), 1, 1, (), (1,), holds_sent=False)


def _flat(meta: TensorMeta) -> TensorMeta:
    return TensorMeta((meta.numel,), meta.dtype)


class _Storages(TorchDispatchMode):
    """Numbers the storages of meta tensors, and records where operators allocate them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors: list[torch.Tensor] = []  # held, so that no storage has the address of an earlier one
        self._numbers: dict[int, int] = {}
        self._allocations: list[Allocation] = []
        self.metas: list[TensorMeta] = []
        """The shape and dtype of each storage, as a flat tensor."""
        for tensor in tensors:
            self.number(tensor)

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, a new one if it has none."""
        key = storage_of(tensor)
        if key not in self._numbers:
            self._numbers[key] = len(self.metas)
            self._tensors.append(tensor)
            self.metas.append(TensorMeta((tensor.untyped_storage().nbytes() // tensor.itemsize,), tensor.dtype))
        return self._numbers[key]

    def unpacked(self, part: _Part, row: torch.Tensor) -> int:
        """The number of a call's result, from what it received."""
        metas, allocations, result = part.unpacking(row)
        numbers = [self.number(row), *range(len(self.metas), len(self.metas) + len(metas) - 1)]
        self.metas += metas[1:]
        for allocation in allocations:
            reads, writes = (tuple(map(numbers.__getitem__, each)) for each in allocation)
            self._allocations.append((reads, writes))
        return numbers[result]

    def taken(self) -> tuple[Allocation, ...]:
        """The allocations since the last call."""
        found = tuple(self._allocations)
        self._allocations.clear()
        return found

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and storage_of(made) in self._numbers:
            return made
        reads = [self.number(leaf) for leaf in iterate_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = len(self.metas)
        writes = {self.number(leaf) for leaf in iterate_leaves(made) if isinstance(leaf, torch.Tensor)}
        if new := tuple(number for number in sorted(writes) if number >= known):
            self._allocations.append((tuple(reads), new))
        return made
