"""The most bytes that this process holds during a call: of live storages, and of the allocator."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.core.pytree import tree_leaves
from spmd.ir.graph import iterate_leaves

SETTLE = 0.03
"""Seconds for which the backend's threads may hold the buffers of a collective that has been waited for."""

WAIT = torch.ops._c10d_functional.wait_tensor.default


@attrs.frozen(eq=False)
class _Storage:
    reference: StorageWeakRef
    nbytes: int
    what: str


class LiveStorages(TorchDispatchMode):
    """Adds up the storages that are alive after every operator, by weak references.

    A storage that only a pending collective or the backend holds is alive, too.

    Args:
        tensors: what is held when the block begins.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, _Storage] = {}
        self.unknown: list[weakref.ref[torch.Tensor]] = []
        self.peak, self.where = 0, ""
        self.held: list[_Storage] = []
        self.settled = True
        for tensor in tensors:
            self._add(tensor, "given")
        self._measure("the arguments")

    @property
    def constants(self) -> list[torch.Tensor]:
        """The tensors that operators have read and that still exist, but that were neither made here nor given."""
        return [tensor for reference in self.unknown if (tensor := reference()) is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in iterate_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.alive:
                self.unknown.append(weakref.ref(leaf))
        made = func(*args, **(kwargs or {}))
        self.settled &= func is not WAIT
        for leaf in iterate_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, str(func))
        self._measure(str(func))
        return made

    def _add(self, tensor: torch.Tensor, maker: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.alive:
            what = f"{maker}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            self.alive[storage._cdata] = _Storage(StorageWeakRef(storage), storage.nbytes(), what)

    def _measure(self, where: str) -> None:
        """Count what is alive; what the backend's threads still hold after a wait is given time to go."""
        if self._total() > self.peak and not self.settled:
            time.sleep(SETTLE)
            self.settled = True
        total = self._total()
        if total > self.peak:
            self.peak, self.where, self.held = total, where, list(self.alive.values())

    def _total(self) -> int:
        self.alive = {key: storage for key, storage in self.alive.items() if not storage.reference.expired()}
        return sum(storage.nbytes for storage in self.alive.values())


@attrs.frozen
class Peaks:
    """The most bytes that this process holds during a call.

    Args:
        live: of storages that are alive after an operator, with arguments and constants.
        where: the operator after which.
        allocator: of what the allocator has given out, with buffers inside kernels and inside the backend.
        held: what is alive then, the largest first, as text.
    """

    live: int
    where: str
    allocator: int
    held: str = attrs.field(repr=False)


def peaks(function: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]) -> Peaks:
    """Call a function several times, each with new arguments, and measure.

    Args:
        function: a jitted function.
        arguments: makes the arguments, DTensors.
    """
    function(*arguments())  # compiles, and makes process groups
    first = arguments()
    with LiveStorages(_shards(first)) as found:
        function(*first)
    constants = found.constants
    del first
    again = arguments()
    with LiveStorages([*_shards(again), *constants]) as live:
        held = live.peak
        result = function(*again)
    del again, result
    last = arguments()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function(*last)
    del last, result
    largest = sorted(live.held, key=lambda storage: -storage.nbytes)
    text = "\n".join(f"  {storage.nbytes:>12,}  {storage.what}" for storage in largest)
    return Peaks(live.peak, live.where, held + _allocated(recorded), text)


def _shards(tree: Any) -> list[torch.Tensor]:
    return [shard for leaf in tree_leaves(tree) for shard in leaf.shards]


def _allocated(recorded: profile) -> int:
    """The most bytes that were allocated beyond those at the beginning."""
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    kineto_events: list[Any] = recorded.profiler.kineto_results.events()
    events = [event for event in kineto_events if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak
