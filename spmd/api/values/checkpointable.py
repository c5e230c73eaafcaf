"""DTensors in torch.distributed.checkpoint (DCP): which parts of the global tensor this process writes and reads.

A chunk is the region of the global tensor, given by offsets and sizes, that a shard holds. One replica of every
non-empty chunk is written. DCP calls the functions here through its `_Checkpointable` protocol
(torch/distributed/_checkpointable.py), whose methods `DTensor` has.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from spmd.core.mesh import Coordinate
from spmd.core.spec import DTensorSpec, P
from spmd.errors import ShardingError

if TYPE_CHECKING:  # slow to import; callers have imported it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def owned(spec: DTensorSpec, coordinates: Sequence[Coordinate], name: str) -> list[int]:
    """The positions in `coordinates` of the ranks whose shards are written to a checkpoint.

    Over all ranks of the mesh, these shards cover the tensor once. Which of several replicas is written depends on a
    hash of `name`, the tensor's name, which spreads the tensors of a checkpoint over the ranks without communication.

    >>> from spmd import P, TensorMeta, make_mesh
    >>> mesh = make_mesh({"data": 2, "model": 3}, runtime="virtual")
    >>> spec = DTensorSpec.make(mesh, P("model"), TensorMeta((4,), torch.float32))
    >>> owned(spec, list(mesh.coordinates()), "w")  # of model's three chunks, 2 + 2 + 0 long, two are written
    [0, 1]
    """
    mesh = spec.mesh
    sharded = {axis for axes in spec.dims for axis in axes}
    replicated = [axis for axis in mesh.names if axis not in sharded]
    turn = zlib.crc32(name.encode()) % mesh.axis_size(replicated)

    def is_written(coordinate: Coordinate) -> bool:
        if mesh.axis_index(coordinate, replicated) != turn:
            return False
        if spec.meta.numel:
            return all(spec.local_shape(coordinate))
        # a tensor without elements: its first shard
        return not any(mesh.axis_index(coordinate, axes) for axes in spec.dims)

    return [position for position, coordinate in enumerate(coordinates) if is_written(coordinate)]


def offsets(spec: DTensorSpec, coordinate: Coordinate) -> tuple[int, ...]:
    """The start of the shard of the rank at `coordinate` in the global tensor, for each dim."""
    return tuple(part.start for part in spec.local_slices(coordinate))


def chunk(spec: DTensorSpec, coordinate: Coordinate) -> ChunkStorageMetadata:
    """The chunk of the rank at `coordinate`, as DCP describes it."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(offsets(spec, coordinate)), torch.Size(spec.local_shape(coordinate)))


def write_items(
    name: str, spec: DTensorSpec, coordinates: Sequence[Coordinate], shards: Sequence[torch.Tensor]
) -> list[WriteItem]:
    """The items that DCP writes for a tensor on this process.

    Args:
        name: the tensor's name in the checkpoint.
        spec: its spec.
        coordinates: the coordinates of this process's ranks.
        shards: their shards.

    Raises:
        ShardingError: the tensor is partial; a checkpoint holds reduced values.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    check_final(spec, name)
    size = torch.Size(spec.meta.shape)
    items = []
    for position in owned(spec, coordinates, name):
        box = chunk(spec, coordinates[position])
        data = TensorWriteData(chunk=box, properties=TensorProperties.create_from_tensor(shards[position]), size=size)
        items.append(WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def check_final(spec: DTensorSpec, name: str) -> None:
    """Raise a ShardingError if a spec is partial."""
    if spec.partial:
        raise ShardingError(
            f"Leaf {name} {spec} is still to be reduced over {', '.join(repr(axis) for axis, _ in spec.partial)}; a "
            f"checkpoint holds final values. Reduce it: .redistribute({P(*spec.dims)!r})."
        )


def read_chunks(spec: DTensorSpec, coordinates: Sequence[Coordinate]) -> list[ChunkStorageMetadata]:
    """The chunks that DCP reads for this process: one for every non-empty shard at `coordinates`, replicas included.

    Raises:
        ShardingError: the tensor is partial; what is read would be reduced again.
    """
    check_final(spec, "to be read")
    return [chunk(spec, coordinates[position]) for position in _filled(spec, coordinates)]


def shard_at(
    spec: DTensorSpec, coordinates: Sequence[Coordinate], shards: Sequence[torch.Tensor], index: MetadataIndex
) -> torch.Tensor:
    """The shard of this process that DCP asks for.

    DCP gives the offsets and, when reading, the position of the chunk in `read_chunks`, which distinguishes replicas.

    Raises:
        ShardingError: no shard of this process has these offsets.
    """
    filled = _filled(spec, coordinates)
    wanted = tuple(index.offset or ())
    hint = index.index
    if hint is not None and hint < len(filled) and offsets(spec, coordinates[filled[hint]]) == wanted:
        return shards[filled[hint]]
    for position in filled or range(len(coordinates)):
        if offsets(spec, coordinates[position]) == wanted:
            return shards[position]
    raise ShardingError(f"Leaf {index.fqn} {spec} has no shard at offsets {wanted} in this process.")


def _filled(spec: DTensorSpec, coordinates: Sequence[Coordinate]) -> list[int]:
    return [position for position, coordinate in enumerate(coordinates) if all(spec.local_shape(coordinate))]
