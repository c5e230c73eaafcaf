"""A checkpoint's folder on disk: complete, checked, and replaced in one step.

    run/checkpoint/
        .metadata                 what is where, in DCP's form and as JSON; the checkpoint is what this file says
        data-0a1b2c3d4e5f/        the data of one save: a file of every process
            __0_0.distcp

A save writes a data folder of its own and then replaces `.metadata`, which is atomic; last it removes the data of
earlier saves. Whenever it is killed, `.metadata` speaks of one complete save. DCP's reader sees an ordinary checkpoint.
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
    """Whether a folder holds a checkpoint, which is complete then, unless files were taken out of it.

    >>> exists("no/such/folder")
    False
    """
    return (Path(path) / METADATA).is_file()


def new_data_name() -> str:
    """A name for the data folder of one save."""
    return f"data-{uuid.uuid4().hex[:12]}"


class Writer(FileSystemWriter):
    """DCP's writer of files, into a data folder; `finish`, which the first process calls, puts it in place.

    Args:
        folder: the checkpoint.
        data: the name of the data folder, the same in all processes.
    """

    def __init__(self, folder: Path, data: str) -> None:
        super().__init__(folder / data)
        self._folder = folder
        self._data = data
        self._is_in_place = False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's files; every chunk gets a checksum, which plain readers ignore."""
        written = super().write_data(plan, planner)
        for info in (result.storage_data for result in written.value()):
            with (self._folder / self._data / info.relative_path).open("rb") as file:
                info.crc32 = _checksum(
                    file, info.offset, info.length
                )  # DCP pickles its records with what is set on them
            info.relative_path = f"{self._data}/{info.relative_path}"
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make this save the checkpoint, then remove earlier ones."""
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
        """Remove what a failed save has written; not of one that failed afterwards, as when another process is gone."""
        if not self._is_in_place:
            shutil.rmtree(self._folder / self._data, ignore_errors=True)


class Reader(FileSystemReader):
    """DCP's reader of files, which reads and checks every chunk once, however many shards want a part of it.

    Nothing in the folder is run: `spmd.checkpoint.manifest` reads what is stored where, torch's unpickler of weights
    reads the chunks.

    Args:
        folder: the checkpoint.

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
        """What the folder held when this reader was made; it may have been replaced since."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for.

        Raises:
            CheckpointError: a chunk is not what was written.
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
        """Check that every file is there, in the folder, and as long as it should be."""
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
        if part.crc32 is None:  # torch alone has written it
            with self._named(name, part):
                check_archive(data)
        return data

    @contextmanager
    def _named(self, name: str, part: Part) -> Iterator[None]:
        """Say in errors what is damaged, and where."""
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
    """Make the names in a folder durable, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
