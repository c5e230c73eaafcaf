"""Reads a save, and checks all that it reads."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from spmd.checkpoint.contents import FilePart
from spmd.checkpoint.folder import METADATA
from spmd.checkpoint.manifest import Manifest, read_manifest
from spmd.checkpoint.payloads import check_archive, read_tensor
from spmd.core.spec import TensorMeta
from spmd.errors import CheckpointError, DamagedError


class Reader(FileSystemReader):
    """DCP's file reader, which reads and checks every chunk once, for any number of shards that need a part of it.

    No code from the folder is run: `spmd.checkpoint.manifest` reads the metadata, and torch's weights-only unpickler
    reads the chunks.

    Args:
        folder: the save's folder.

    Raises:
        DamagedError: the save is not complete, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self.manifest = self._read_manifest()
        self.contents = self.manifest.contents
        self._metadata = self.contents.metadata()
        self._check_files()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata when this reader was made; the checkpoint may have been replaced since."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan into the planner's tensors and values.

        Raises:
            DamagedError: a chunk or value is damaged.
        """
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        for index, items in wanted.items():
            if items[0].type == LoadItemType.BYTE_IO:
                planner.load_bytes(items[0], io.BytesIO(self._read(index.fqn, self.contents.values[index.fqn])))
                continue
            chunk = self._read_chunk(index)
            for item in items:
                target = planner.resolve_tensor(item).detach()
                ranges = zip(item.storage_offsets, item.lengths, strict=True)
                target.copy_(chunk[tuple(slice(start, start + length) for start, length in ranges)])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_manifest(self) -> Manifest:
        path = self._folder / METADATA
        try:
            return read_manifest(path.read_bytes())
        except (CheckpointError, OSError) as error:
            raise DamagedError(f"{path} cannot be read: {error}. {_REMEDY}") from error

    def _check_files(self) -> None:
        """Check that every file exists, is inside the folder, and has the expected length."""
        lengths: dict[str, int] = {}
        for part in self.contents.parts:
            lengths[part.file] = max(lengths.get(part.file, 0), part.offset + part.length)
        wrong = [text for name, length in sorted(lengths.items()) if (text := self._wrong_file(name, length))]
        if wrong:
            raise DamagedError(f"The checkpoint in {self._folder} is incomplete: {'; '.join(wrong)}. {_REMEDY}")

    def _wrong_file(self, name: str, length: int) -> str | None:
        path = self._folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if not path.resolve().is_relative_to(self._folder.resolve()):
                return f"{name} is a link to a file elsewhere"
            size = path.stat().st_size
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return f"{name} has {size} bytes and not {length}" if size < length else None

    def _read_chunk(self, index: MetadataIndex) -> torch.Tensor:
        name, chunk = index.fqn, self._metadata.storage_data[index]
        data = self._read(name, chunk.part)
        with self._named(name, chunk.part):
            return read_tensor(data, TensorMeta(chunk.sizes, self.contents.tensors[name].meta.dtype))

    def _read(self, name: str, part: FilePart) -> bytes:
        path = self._folder / part.file
        try:
            with path.open("rb") as file:
                file.seek(part.offset)
                data = file.read(part.length)
        except OSError as error:
            raise DamagedError(f"{name} in {path} cannot be read: {error}. {_REMEDY}") from error
        if len(data) != part.length or part.crc32 not in (None, zlib.crc32(data)):
            raise DamagedError(f"The bytes of {name} in {path} are not those that were written. {_REMEDY}")
        if part.crc32 is None:  # written by torch without spmd
            with self._named(name, part):
                check_archive(data)
        return data

    @contextmanager
    def _named(self, name: str, part: FilePart) -> Iterator[None]:
        """Add to errors the name of what is damaged, and its file."""
        try:
            yield
        except CheckpointError as error:
            raise DamagedError(f"{name} in {self._folder / part.file} is damaged: {error}. {_REMEDY}") from error


_REMEDY = "Load an older checkpoint, or save this one again."
