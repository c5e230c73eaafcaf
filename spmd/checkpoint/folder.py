"""A checkpoint's folder on disk: complete, checked, and replaced in one step.

    run/checkpoint/
        .metadata                 what is stored where, as DCP's pickle and as JSON; defines the checkpoint
        data-0a1b2c3d4e5f/        the data of one save: one file for each process
            __0_0.distcp

A save writes a new data folder, then replaces `.metadata`, which is atomic, and last removes the data of earlier
saves. If it is killed at any point, `.metadata` refers to one complete save. DCP's own reader can read the folder.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from spmd.checkpoint.contents import Part
from spmd.checkpoint.manifest import Manifest, append_manifest, read_manifest
from spmd.checkpoint.payloads import check_archive, read_tensor
from spmd.core.spec import TensorMeta
from spmd.errors import CheckpointError

METADATA = ".metadata"

_DATA = re.compile(r"data-[0-9a-f]{12}")
_BLOCK = 1 << 20


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a checkpoint; it is complete unless files were removed from it.

    >>> exists("no/such/folder")
    False
    """
    return (Path(path) / METADATA).is_file()


def new_data_name() -> str:
    """A name for the data folder of one save."""
    return f"data-{uuid.uuid4().hex[:12]}"


class Writer(FileSystemWriter):
    """DCP's file writer, for a data folder; `finish`, which DCP calls on the first process, makes it the checkpoint.

    Args:
        folder: the checkpoint's folder.
        data: the name of the data folder, the same in all processes.
    """

    def __init__(self, folder: Path, data: str) -> None:
        super().__init__(folder / data)
        self._folder = folder
        self._data = data
        self._is_in_place = False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's files, and add to every record a checksum, which DCP's own reader ignores."""
        written = super().write_data(plan, planner)
        for info in (result.storage_data for result in written.value()):
            with (self._folder / self._data / info.relative_path).open("rb") as file:
                # DCP pickles its records with all attributes that are set on them.
                info.crc32 = _checksum(file, info.offset, info.length)
            info.relative_path = f"{self._data}/{info.relative_path}"
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`, which makes this save the checkpoint, then remove the data of earlier saves."""
        super().finish(metadata, results)
        append_manifest(self._folder / self._data / METADATA, metadata)
        _sync(self._folder / self._data)
        self._is_in_place = True
        os.replace(self._folder / self._data / METADATA, self._folder / METADATA)
        _sync(self._folder)
        _sync(self._folder.absolute().parent)
        for path in self._folder.iterdir():
            if _DATA.fullmatch(path.name) and path.name != self._data:
                shutil.rmtree(path, ignore_errors=True)

    def discard(self) -> None:
        """Remove the data of a failed save, unless `finish` has already made it the checkpoint."""
        if not self._is_in_place:
            shutil.rmtree(self._folder / self._data, ignore_errors=True)


class Reader(FileSystemReader):
    """DCP's file reader, which reads and checks every chunk once, for any number of shards that need a part of it.

    No code from the folder is run: `spmd.checkpoint.manifest` reads the metadata, and torch's weights-only unpickler
    reads the chunks.

    Args:
        folder: the checkpoint's folder.

    Raises:
        CheckpointError: there is no complete checkpoint.
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
            CheckpointError: a chunk or value is damaged.
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
        if not exists(self._folder):
            raise CheckpointError(
                f"There is no checkpoint in {self._folder}: it has no file {METADATA}, which a save writes last. Check "
                "the path, or wait() for the save."
            )
        path = self._folder / METADATA
        try:
            return read_manifest(path.read_bytes())
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. {_REMEDY}") from error

    def _check_files(self) -> None:
        """Check that every file exists, is inside the folder, and has the expected length."""
        lengths: dict[str, int] = {}
        for part in self.contents.parts:
            lengths[part.file] = max(lengths.get(part.file, 0), part.offset + part.length)
        wrong = [text for name, length in sorted(lengths.items()) if (text := self._wrong_file(name, length))]
        if wrong:
            raise CheckpointError(f"The checkpoint in {self._folder} is incomplete: {'; '.join(wrong)}. {_REMEDY}")

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

    def _read(self, name: str, part: Part) -> bytes:
        path = self._folder / part.file
        with path.open("rb") as file:
            file.seek(part.offset)
            data = file.read(part.length)
        if len(data) != part.length or part.crc32 not in (None, zlib.crc32(data)):
            raise CheckpointError(f"The bytes of {name} in {path} are not those that were written. {_REMEDY}")
        if part.crc32 is None:  # written by torch without spmd
            with self._named(name, part):
                check_archive(data)
        return data

    @contextmanager
    def _named(self, name: str, part: Part) -> Iterator[None]:
        """Add to errors the name of what is damaged, and its file."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{name} in {self._folder / part.file} is damaged: {error}. {_REMEDY}") from error


_REMEDY = "Load an older checkpoint, or save this one again."


def _checksum(file: IO[bytes], offset: int, length: int) -> int:
    """The CRC-32 of a part of a file."""
    found = 0
    for block in _blocks(file, offset, length):
        found = zlib.crc32(block, found)
    return found


def _blocks(file: IO[bytes], offset: int, length: int) -> Iterator[bytes]:
    file.seek(offset)
    while length > 0:
        block = file.read(min(length, _BLOCK))
        if not block:
            raise CheckpointError(f"{file.name} ends {length} bytes too early. Is the disk full?")
        length -= len(block)
        yield block


def _sync(folder: Path) -> None:
    """Make the entries of a folder durable (fsync), if the system supports it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
