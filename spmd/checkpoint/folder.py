"""A checkpoint's folder on disk: saves that never change, each of which appears and disappears in one step.

    run/checkpoint/
        data-00000007-0a1b2c3d4e5f/         a complete save, which is a checkpoint of DCP itself
            .metadata                       what is stored where, as DCP's pickle and as JSON
            __0_0.distcp                    the data: one file for each process
        data-00000004-9c1f7e3b5a20-best/    an older one, with a name
        .metadata                           for DCP's tools, when they are given the whole folder: the newest save
        tmp-data-00000008-5d6e7f8091a2/     a save that is being written, or removed

A save is written under a temporary name and renamed when it is complete, and renamed back before its files are removed.
If it is killed at any point, the folder holds complete saves only. A load that runs in another process while the save
that it reads is removed finds its folder gone, and starts again with a newer one.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

import attrs

from spmd.checkpoint.manifest import has_manifest
from spmd.errors import CheckpointError

METADATA = ".metadata"

TEMPORARY = "tmp-"
"""The beginning of the name of a save that is not complete."""

_SAVE = re.compile(r"data-(?P<number>[0-9]{8,20})-[0-9a-f]{12}(?:-(?P<name>.+))?")
_REMOVABLE = re.compile(rf"{TEMPORARY}data-.*|data-[0-9a-f]{{12}}|{_SAVE.pattern}")
"""What a save may remove: other saves, what killed ones have left, and the data of earlier versions."""

_NAME = re.compile(r"[\w.+=@-]{1,100}")


@attrs.frozen
class Save:
    """A complete save in a checkpoint's folder.

    Args:
        number: its place in the order of saves.
        folder: its folder's name, in the checkpoint's folder.
        name: the name that the user has given to it.
    """

    number: int
    folder: str
    name: str | None


def exists(path: str | os.PathLike[str], *, name: str | None = None) -> bool:
    """Whether a folder holds a checkpoint (of this name); it is complete unless files were removed from it.

    >>> exists("no/such/folder")
    False
    """
    return bool(places(Path(path), name))


def saved(path: str | os.PathLike[str], *, name: str | None = None) -> list[Path]:
    """The folders of all saves in a checkpoint's folder (or of the one of this name), the newest first.

    Each is a checkpoint of its own, which `load` and torch's tools take, and which can be copied elsewhere.

    >>> saved("no/such/folder")
    []
    """
    return [Path(path) / place for place in places(Path(path), name)]


def places(folder: Path, name: str | None = None) -> list[str]:
    """Where checkpoints are in a folder, the newest first: folders relative to it.

    The folder itself is one if torch has saved there, or an earlier version of `spmd`.
    """
    saves = [save.folder for save in _saves(folder) if name in (None, save.name)]
    whole = folder / METADATA
    is_whole = name is None and whole.is_file() and not (saves and has_manifest(whole))
    return [".", *saves] if is_whole else saves


def new_save(folder: Path, name: str | None) -> str:
    """A name for the folder of the next save."""
    number = max((save.number for save in _saves(folder)), default=0) + 1
    return f"data-{number:08}-{uuid.uuid4().hex[:12]}" + ("" if name is None else f"-{name}")


def check_options(keep: int | None, name: str | None) -> None:
    """Raise a CheckpointError if a save cannot have these options."""
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"keep must be a number of saves from 1, or None for all of them (got {keep!r}).")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise CheckpointError(
            f"The name of a save must be 1 to 100 letters, digits and characters of '_.+=@-' (got {name!r:.120})."
        )


def remove_older(folder: Path, newest: str, keep: int | None) -> None:
    """Remove saves when a new one is complete: unnamed ones but the last `keep`, those whose name it has, and remains.

    Args:
        folder: the checkpoint's folder.
        newest: the folder of the new save.
        keep: the number of unnamed saves that stay; None for all.
    """
    saves = _saves(folder)
    unnamed = [save.folder for save in saves if save.name is None]
    named = {save.name: save.folder for save in reversed(saves) if save.name is not None}
    stay = {newest, *unnamed[:keep], *named.values()}
    for path in list(folder.iterdir()):
        if _REMOVABLE.fullmatch(path.name) and path.name not in stay:
            remove(path)


def remove(path: Path) -> None:
    """Remove a save, complete or not: first its name, then its files."""
    if not path.name.startswith(TEMPORARY):
        try:
            path = path.rename(path.with_name(TEMPORARY + path.name))
        except OSError:  # somebody else removes it
            return
    shutil.rmtree(path, ignore_errors=True)


def _saves(folder: Path) -> list[Save]:
    """The complete saves in a folder, the newest first; links are not followed."""
    paths = [path for path in folder.iterdir() if not path.is_symlink()] if folder.is_dir() else []
    found = [(path.name, match) for path in paths if (match := _SAVE.fullmatch(path.name))]
    saves = [Save(int(match["number"]), place, match["name"]) for place, match in found]
    return sorted(saves, key=lambda save: (save.number, save.folder), reverse=True)


def sync(folder: Path) -> None:
    """Make the entries of a folder durable (fsync), if the system supports it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
