"""What a checkpoint holds, and where: tensors in chunks, and plain values, each in a part of a file.

`parse` makes the `Contents` from a plain document of untrusted origin, and checks everything in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from spmd.core.documents import Fields, Kind, ListOf, MapOf, Maybe, schema_violation
from spmd.core.spec import TensorMeta
from spmd.errors import CheckpointError

Document = dict[str, Any]
"""A JSON object."""

_PART: Mapping[str, Kind] = {"file": str, "offset": int, "length": int, "crc32": Maybe(int)}
_CHUNK = Fields({"offsets": ListOf(int), "sizes": ListOf(int), **_PART})
_SCHEMA = Fields(
    {
        "tensors": MapOf(Fields({"dtype": str, "shape": ListOf(int), "chunks": ListOf(_CHUNK)})),
        "values": MapOf(Fields(_PART)),
    }
)

_PLAIN_NAME = re.compile(r"[\w.,+=@() -]{1,200}")
"""A valid component of a file's relative path; `.` and `..` are not allowed."""


@attrs.frozen
class FilePart:
    """A part of a file.

    Args:
        file: the file's path relative to the checkpoint's folder.
        offset, length: the position of the part, in bytes.
        crc32: the checksum of its bytes; None in a checkpoint that torch wrote without `spmd`.
    """

    file: str
    offset: int
    length: int
    crc32: int | None


@attrs.frozen
class FileRegion:
    """A region of a tensor, and the part of a file that holds it; offsets and sizes are in elements, for each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    part: FilePart


@attrs.frozen
class StoredTensor:
    """A tensor of a checkpoint: its global shape and dtype, and its chunks."""

    meta: TensorMeta
    chunks: tuple[FileRegion, ...]


@attrs.frozen
class Contents:
    """The tensors and plain values of a checkpoint, by name."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, FilePart]

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors and values."""
        return frozenset({*self.tensors, *self.values})

    @property
    def parts(self) -> list[FilePart]:
        """The parts of files of all chunks and values."""
        return [*(chunk.part for tensor in self.tensors.values() for chunk in tensor.chunks), *self.values.values()]

    def metadata(self) -> Metadata:
        """The same as DCP's `Metadata`, from which DCP plans a load."""
        described: dict[str, Any] = {name: BytesStorageMetadata() for name in self.values}
        stored: dict[MetadataIndex, Any] = {MetadataIndex(name): part for name, part in self.values.items()}
        for name, tensor in self.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
            properties = TensorProperties(dtype=tensor.meta.dtype)
            described[name] = TensorStorageMetadata(properties, torch.Size(tensor.meta.shape), chunks)
            # empty chunks first: a non-empty chunk with the same offsets replaces them
            filled = sorted(tensor.chunks, key=lambda chunk: math.prod(chunk.sizes) > 0)
            stored.update((MetadataIndex(name, chunk.offsets), chunk) for chunk in filled)
        return Metadata(described, storage_data=stored)


def describe(metadata: Metadata) -> Document:
    """The document of what DCP has just written; `Writer` has added checksums to the storage data."""
    tensors: Document = {}
    values: Document = {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            chunks = [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    **_describe_part(metadata.storage_data[MetadataIndex(name, chunk.offsets)]),
                }
                for chunk in stored.chunks
            ]
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(stored.size), "chunks": chunks}
        else:
            values[name] = _describe_part(metadata.storage_data[MetadataIndex(name)])
    return {"tensors": tensors, "values": values}


def _describe_part(info: Any) -> Document:
    return {"file": info.relative_path, "offset": info.offset, "length": info.length, "crc32": info.crc32}


def parse(document: Any) -> Contents:
    """The contents that a document describes.

    Raises:
        CheckpointError: something is missing, of the wrong type or out of bounds, or a file is not in the checkpoint's
            folder.
    """
    wrong = schema_violation(document, _SCHEMA)
    if wrong is not None:
        raise CheckpointError(wrong)
    both = document["tensors"].keys() & document["values"].keys()
    if both:
        raise CheckpointError(f"{min(both)!r} is a tensor and a value")
    return Contents(
        {name: _tensor(name, entry) for name, entry in document["tensors"].items()},
        {name: _part(entry) for name, entry in document["values"].items()},
    )


def _tensor(name: str, entry: Document) -> StoredTensor:
    dtype = vars(torch).get(entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} has the unknown dtype {entry['dtype']!r}")
    meta = TensorMeta(entry["shape"], dtype)
    chunks = tuple(FileRegion(tuple(c["offsets"]), tuple(c["sizes"]), _part(c)) for c in entry["chunks"])
    for chunk in chunks:
        if not _is_inside(chunk, meta.shape):
            raise CheckpointError(f"a chunk of {name!r} {meta} is outside of it: {chunk.offsets}, {chunk.sizes}")
        if math.prod(chunk.sizes) * dtype.itemsize > chunk.part.length:
            raise CheckpointError(
                f"a chunk of {name!r} {meta} of sizes {chunk.sizes} has {chunk.part.length} bytes only"
            )
    return StoredTensor(meta, chunks)


def _is_inside(chunk: FileRegion, shape: tuple[int, ...]) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    return all(offset + size <= whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True))


def _part(entry: Document) -> FilePart:
    if not _is_plain(entry["file"]):
        raise CheckpointError(f"{entry['file'][:100]!r} is not the name of a file in the checkpoint's folder")
    return FilePart(entry["file"], entry["offset"], entry["length"], entry["crc32"])


@lru_cache(maxsize=4096)
def _is_plain(file: str) -> bool:
    names = file.split("/")
    return len(file) <= 1000 and all(_PLAIN_NAME.fullmatch(name) and name not in (".", "..") for name in names)


def check_tiling(name: str, tensor: StoredTensor) -> None:
    """Check that the chunks of a tensor hold each of its elements exactly once.

    Raises:
        CheckpointError: an element is missing, or is in two chunks.
    """
    chunks = [chunk for chunk in tensor.chunks if math.prod(chunk.sizes)]
    stored = sum(math.prod(chunk.sizes) for chunk in chunks)
    if stored < tensor.meta.numel:
        raise CheckpointError(f"{name}: only {stored} of the {tensor.meta.numel} elements of {tensor.meta} are stored")
    if stored > tensor.meta.numel or _overlap(chunks):
        raise CheckpointError(f"{name}: chunks of {tensor.meta} overlap")


def _overlap(chunks: list[FileRegion]) -> bool:
    """Whether two chunks share an element; compares only chunks that overlap in the dim with the most offsets."""
    if not chunks or not chunks[0].sizes:
        return len(chunks) > 1
    dim = max(range(len(chunks[0].sizes)), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    active: list[FileRegion] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > chunk.offsets[dim]]
        if any(_boxes_overlap(chunk, other) for other in active):
            return True
        active.append(chunk)
    return False


def _boxes_overlap(one: FileRegion, other: FileRegion) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(start < begin + length and begin < start + size for start, size, begin, length in sides)
