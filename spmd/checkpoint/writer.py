"""Writes a save: every process its files, the first process what they hold; then it is complete, or is removed."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from spmd.checkpoint.folder import METADATA, TEMPORARY, remove, remove_older, sync
from spmd.checkpoint.manifest import append_manifest
from spmd.errors import CheckpointError

_NEWEST = ".newest"
"""In a save that is being written, what will be the `.metadata` of the checkpoint's folder."""

_BLOCK = 1 << 20


class CheckpointWriter(FileSystemWriter):
    """DCP's file writer, for a save; `finish`, which DCP calls on the first process, makes it complete.

    Args:
        folder: the checkpoint's folder.
        save: the name of the save's folder, the same in all processes.
        keep: the number of unnamed saves that stay in the folder; None for all.
    """

    def __init__(self, folder: Path, save: str, keep: int | None) -> None:
        super().__init__(folder / f"{TEMPORARY}{save}")
        self._folder = folder
        self._path = Path(self.path)
        self._save = save
        self._keep = keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's files, and add to every record a checksum, which DCP's own reader ignores."""
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:
            raise _error_of_file(error) from error
        for info in (result.storage_data for result in written.value()):
            with (self._path / info.relative_path).open("rb") as file:
                # DCP pickles its records with all attributes that are set on them.
                info.crc32 = _checksum(file, info.offset, info.length)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the save complete by its name, the newest for DCP's tools, and remove older ones."""
        super().finish(metadata, results)
        # Torch 2.11 leaves `metadata` as it is, and writes a copy that knows what is stored where.
        metadata = pickle.loads((self._path / METADATA).read_bytes())
        append_manifest(self._path / METADATA, metadata)
        for info in metadata.storage_data.values():
            info.relative_path = f"{self._save}/{info.relative_path}"
        (self._path / _NEWEST).write_bytes(pickle.dumps(metadata))
        append_manifest(self._path / _NEWEST, metadata)
        sync(self._path)
        save = self._path.rename(self._folder / self._save)
        os.replace(save / _NEWEST, self._folder / METADATA)
        sync(self._folder)
        sync(self._folder.absolute().parent)
        remove_older(self._folder, self._save, self._keep)

    def discard(self) -> None:
        """Remove a save that has failed; nothing if it is complete."""
        remove(self._path)


def _error_of_file(error: BaseException) -> BaseException:
    """The error of the file because of which torch's archive could not be written; torch raises one of its own."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return found or error


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
