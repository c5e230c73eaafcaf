"""A redistribution in one exchange of blocks: every rank gets what it lacks of its shard from ranks that hold it.

Source and target may be on different meshes. `spmd.collectives.step` has collectives along mesh axes; an exchange is
one all_to_all in which each rank sends exactly the blocks that it holds and another lacks. Without a reduction no
sequence of steps makes ranks receive less. Parts of a pending reduction are sent to the rank that needs the result,
which reduces them in their order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from spmd.collectives.primitives import ALL_TO_ALL
from spmd.collectives.traffic import active_traffic
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.placement import combine
from spmd.core.spec import DTensorSpec

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop in each dim of a part of the global tensor."""

Part: TypeAlias = tuple[int, ...]
"""Which part of a pending reduction: the index along each partial axis of the source."""


@attrs.frozen
class Block:
    """What one process gives another, or itself.

    Args:
        sender, receiver: the numbers of the processes, as in `Mesh.ranks`; on virtual meshes those of ranks.
        part: the part that it belongs to.
        box: where it is in the global tensor.
    """

    sender: int
    receiver: int
    part: Part
    box: Box

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(stop - start for start, stop in self.box)


@attrs.frozen(cache_hash=True)
class BlockExchange:
    """One exchange from a spec to another of the same shape and dtype, which may be on another mesh.

    Axes that are partial in both specs, with one reduction on one mesh, stay so; the other pending reductions are done.
    Along axes that are partial in the target only, the ranks at index 0 get the values and the others neutral elements.
    """

    source: DTensorSpec
    target: DTensorSpec

    @property
    def kind(self) -> str:
        """It is sent as an all_to_all."""
        return ALL_TO_ALL.name

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the source's mesh."""
        return self.source.mesh.names

    @property
    def is_collective(self) -> bool:
        """Whether ranks communicate: not if each has what it needs."""
        return any(block.sender != block.receiver for block in self.blocks)

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes of both meshes, in ascending order."""
        return tuple(sorted({*self.source.mesh.ranks, *self.target.mesh.ranks}))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, ordered by receiver, part and place."""
        return _blocks(self)

    @cached_property
    def bytes(self) -> float:
        """The largest number of bytes that any process sends."""
        return float(max(self.sent))

    @property
    def sent(self) -> tuple[int, ...]:
        """The bytes that each process of the source's mesh sends, in rank order."""
        itemsize, ranks = self.source.meta.dtype.itemsize, self.source.mesh.ranks
        return tuple(itemsize * sum(block.numel for block in self.sent_by(rank)) for rank in ranks)

    @property
    def kept(self) -> tuple[str, ...]:
        """The axes that stay partial."""
        same = self.source.mesh == self.target.mesh
        return tuple(axis for axis, op in self.source.partial if same and (axis, op) in self.target.partial)

    def neutral_at(self, coordinate: Coordinate) -> complex | float | int | bool | None:
        """What fills the shard at a coordinate of the target's mesh; None where it has values."""
        new = tuple(item for item in self.target.partial if item[0] not in self.kept)
        return attrs.evolve(self.target, partial=new).neutral_at(coordinate)

    def taken(self, shard: Tensor, block: Block) -> Tensor:
        """A block that the shard of its sender holds; a view."""
        return _view(shard, self.source, block.sender, block.box)

    def assembled(self, receiver: int, values: Mapping[Block, Tensor]) -> Tensor:
        """The shard of a process from its blocks."""
        mesh = self.target.mesh
        coordinate = mesh.coordinate(mesh.ranks.index(receiver))
        shape, dtype = self.target.local_shape(coordinate), self.target.meta.dtype
        if (neutral := self.neutral_at(coordinate)) is not None:
            return torch.full(shape, neutral, dtype=dtype, device=mesh.device)
        total: Tensor | None = None
        for _, blocks in itertools.groupby(self.received_by(receiver), key=lambda block: block.part):
            part = torch.empty(shape, dtype=dtype, device=mesh.device)
            for block in blocks:
                _view(part, self.target, receiver, block.box).copy_(values[block])
            total = part if total is None else combine(self.source.partial[0][1], total, part)
        return torch.empty(shape, dtype=dtype, device=mesh.device) if total is None else total

    def received_by(self, receiver: int) -> tuple[Block, ...]:
        """The blocks of one receiver, its own among them."""
        return _by_receiver(self).get(receiver, ())

    def sent_by(self, sender: int) -> tuple[Block, ...]:
        """The blocks that a process sends to others, by receiver."""
        return _by_sender(self).get(sender, ())

    def run_virtual(self, shards: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The shards of all ranks of the target's mesh from those of all ranks of the source's."""
        if (traffic := active_traffic()) is not None and self.is_collective:
            traffic.record(self.kind, self.axes, self.sent)
        return tuple(
            self.assembled(
                receiver, {block: self.taken(shards[block.sender], block) for block in self.received_by(receiver)}
            )
            for receiver in self.target.mesh.ranks
        )

    def __str__(self) -> str:
        where = "" if self.source.mesh == self.target.mesh else f" on {self.target.mesh}"
        return f"exchange[{', '.join(self.axes)}]: {self.source.pspec!r} -> {self.target.pspec!r}{where}"


def _view(shard: Tensor, spec: DTensorSpec, process: int, box: Box) -> Tensor:
    """The part of a process's shard that is at `box` in the global tensor."""
    held = spec.local_slices(spec.mesh.coordinate(spec.mesh.ranks.index(process)))
    return shard[tuple(slice(start - s.start, stop - s.start) for (start, stop), s in zip(box, held, strict=True))]


@lru_cache(maxsize=4096)
def _blocks(exchange: BlockExchange) -> tuple[Block, ...]:
    source, target = exchange.source, exchange.target
    holders = _holders(source)
    load = dict.fromkeys(source.mesh.ranks, 0)
    found = []
    for receiver, where in zip(target.mesh.ranks, target.mesh.coordinates(), strict=True):
        if exchange.neutral_at(where) is not None:
            continue
        wanted = _box(target, where)
        for part in _parts(exchange, where):
            for held, ranks in holders.get(part, {}).items():
                box = _overlap(held, wanted)
                if box is None:
                    continue
                # The own copy, else that of the rank that sends least so far, of those the next one in the order.
                sender = min(ranks, key=lambda rank: (rank != receiver, load[rank], (rank - receiver) % len(load)))
                block = Block(sender, receiver, part, box)
                load[sender] += block.numel * (sender != receiver)
                found.append(block)
    return tuple(found)


@lru_cache(maxsize=4096)
def _by_receiver(exchange: BlockExchange) -> Mapping[int, tuple[Block, ...]]:
    groups = itertools.groupby(exchange.blocks, key=lambda block: block.receiver)
    return {receiver: tuple(blocks) for receiver, blocks in groups}


@lru_cache(maxsize=4096)
def _by_sender(exchange: BlockExchange) -> Mapping[int, tuple[Block, ...]]:
    found: dict[int, list[Block]] = {}
    for block in exchange.blocks:
        if block.sender != block.receiver:
            found.setdefault(block.sender, []).append(block)
    return {sender: tuple(sorted(blocks, key=lambda block: block.receiver)) for sender, blocks in found.items()}


@lru_cache(maxsize=4096)
def _holders(spec: DTensorSpec) -> Mapping[Part, Mapping[Box, list[int]]]:
    """The processes that hold each block of each part of a value."""
    found: dict[Part, dict[Box, list[int]]] = {}
    positions = [spec.mesh.axis_position(axis) for axis, _ in spec.partial]
    for process, where in zip(spec.mesh.ranks, spec.mesh.coordinates(), strict=True):
        part = tuple(where[position] for position in positions)
        found.setdefault(part, {}).setdefault(_box(spec, where), []).append(process)
    return found


def _parts(exchange: BlockExchange, where: Coordinate) -> Iterator[Part]:
    """The parts that the rank at a coordinate of the target's mesh reduces."""
    mesh: Mesh = exchange.source.mesh
    choices = [
        (where[mesh.axis_position(axis)],) if axis in exchange.kept else range(mesh.axis_size(axis))
        for axis, _ in exchange.source.partial
    ]
    return itertools.product(*choices)


def _box(spec: DTensorSpec, where: Coordinate) -> Box:
    return tuple((part.start, part.stop) for part in spec.local_slices(where))


def _overlap(left: Box, right: Box) -> Box | None:
    """What two boxes have in common; None if that is empty."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return None if any(start >= stop for start, stop in found) else found
