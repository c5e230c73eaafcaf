"""DTensors in torch.distributed.checkpoint (DCP): which parts of the global tensor this process writes and reads.

A chunk is the box of the global tensor, offsets and sizes, that a shard fills. Of every chunk one replica is written,
and empty ones are not. DCP finds the functions here through the methods of `DTensor` that it looks for, its
`_Checkpointable` protocol (torch/distributed/_checkpointable.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from spmd.core.mesh import Coordinate
from spmd.core.spec import DTensorSpec, P
from spmd.errors import ShardingError

if TYPE_CHECKING:  # whoever calls has imported it; importing spmd should not
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def owned(spec: DTensorSpec, coordinates: Sequence[Coordinate], name: str) -> list[int]:
    """The positions in `coordinates` of the shards that are written for their ranks.

    Over all ranks of the mesh they cover the tensor once. Which of several replicas is written depends on the tensor's
    name, so that the tensors of a checkpoint spread over the ranks; every rank finds the same without asking.

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
        return not any(mesh.axis_index(coordinate, axes) for axes in spec.dims)  # a tensor of nothing: its first shard

    return [position for position, coordinate in enumerate(coordinates) if is_written(coordinate)]


def offsets(spec: DTensorSpec, coordinate: Coordinate) -> tuple[int, ...]:
    """Where the shard of the rank at `coordinate` begins in the global tensor."""
    return tuple(part.start for part in spec.local_slices(coordinate))


def chunk(spec: DTensorSpec, coordinate: Coordinate) -> ChunkStorageMetadata:
    """The box that the shard of the rank at `coordinate` fills, as DCP describes it."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(offsets(spec, coordinate)), torch.Size(spec.local_shape(coordinate)))


def write_items(
    name: str, spec: DTensorSpec, coordinates: Sequence[Coordinate], shards: Sequence[torch.Tensor]
) -> list[WriteItem]:
    """What DCP is to write of a tensor, on this process.

    Raises:
        ShardingError: the tensor is partial: a checkpoint holds final values.
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
    """The chunks that DCP is to read for this process: one for every shard that is not empty, replicas included."""
    return [chunk(spec, coordinates[position]) for position in _filled(spec, coordinates)]


def shard_at(
    spec: DTensorSpec, coordinates: Sequence[Coordinate], shards: Sequence[torch.Tensor], index: MetadataIndex
) -> torch.Tensor:
    """The shard that DCP asks for.

    It asks by offsets, and when reading also by the number of the chunk in `read_chunks`, which tells replicas apart.
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
