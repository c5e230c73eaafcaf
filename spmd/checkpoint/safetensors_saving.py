"""Saving tensors as safetensors files, in the layout of Hugging Face's models.

The format is a length, a header in JSON, and the bytes of the tensors. Files are written here and not by the package
`safetensors`, which takes all tensors of a file at once: here the first process gathers one at a time and writes it.
"""

from __future__ import annotations

import ctypes
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from spmd.api.values.checkpointable import check_final
from spmd.api.values.dtensor import DTensor
from spmd.api.values.wrapper import require_shards
from spmd.checkpoint.folder import sync
from spmd.checkpoint.gathering import gathered
from spmd.checkpoint.leaves import describe_leaf, named_leaves
from spmd.checkpoint.processes import Processes, processes_of
from spmd.checkpoint.safetensors_loading import DTYPES, FILE, INDEX, SINGLE
from spmd.collectives.distributed.checksums import as_bytes
from spmd.core.pytree import leaf_remedy, tree_leaves
from spmd.core.quantity import parse_bytes
from spmd.core.spec import TensorMeta
from spmd.errors import CheckpointError
from spmd.job.tracebacks import hides_internals

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@hides_internals
def save_safetensors(tree: object, path: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
    """Save the tensors of a pytree as safetensors files, as transformers reads them.

    On a distributed mesh this is a collective call: the first rank holds one tensor at a time whole, and writes it; the
    others send it their shards. Files get their names when all are written: a save that is killed leaves none that is
    not whole. Of several files that replace several, a kill at that moment can leave a part, without an index.

    Args:
        tree: a pytree of DTensors and plain tensors, such as a dict by names. The names in the file are the paths,
            joined by dots.
        path: a folder, for `model.safetensors`, or a file `*.safetensors`. It replaces an earlier save there.
        max_shard_size: the bytes of tensors in one file, as a number or as text such as "5GB". Of more, there are
            several files, `model-00001-of-00002.safetensors`, and an index `model.safetensors.index.json`.

    Raises:
        ShardingError: a partial leaf, or a DTensor that was donated.
        CheckpointError: a leaf that cannot be stored, a tensor that is in the tree twice, or a failure to write.
        DivergenceError: ranks save different trees, or to different paths.
        SpmdError: a rank failed, or never makes the call.
        PlanError: a `max_shard_size` that is no amount.

    >>> import spmd, tempfile
    >>> mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    >>> w = spmd.distribute(torch.arange(3.0), spmd.P("data"), mesh)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_safetensors({"layer": {"w": w}}, folder)
    ...     spmd.load_safetensors(folder, spmd.P(), mesh)
    {'layer.w': DTensor(f32[3] P() on Mesh(data=2), shards 2x[3])}
    """
    meshes = (leaf.mesh for leaf in tree_leaves(tree) if isinstance(leaf, DTensor))
    processes = processes_of("save_safetensors", meshes)

    def prepare() -> tuple[dict[str, torch.Tensor], list[_File]]:
        leaves = _checked(tree)
        metas = {name: TensorMeta.of(leaf) for name, leaf in leaves.items()}
        return leaves, _files(Path(path), metas, parse_bytes(max_shard_size, "max_shard_size"))

    leaves, files = processes.together(prepare)
    claims = {"the path": os.fspath(path), "max_shard_size": repr(max_shard_size)}
    processes.agree(lambda: {**claims, **{f"leaf {name}": describe_leaf(leaf) for name, leaf in leaves.items()}})
    try:
        failure = None
        for file in files:
            failure = file.write(leaves, processes, failure)
        processes.together(lambda: _finish(Path(path), files, failure) if processes.is_first else None)
    finally:
        if processes.is_first:
            for file in files:
                file.temporary.unlink(missing_ok=True)


@attrs.frozen
class _File:
    """A file to write.

    Args:
        path: its place.
        metas: the metas of its tensors by name, in the order of the file.
        temporary: where it is until it is whole.
    """

    path: Path
    metas: Mapping[str, TensorMeta]
    temporary: Path

    def write(
        self, leaves: Mapping[str, torch.Tensor], processes: Processes, failure: OSError | None
    ) -> OSError | None:
        """Gather the tensors one by one in the first process, which writes them unless writing has failed.

        Returns:
            The error of writing, of this file or before it.
        """
        if processes.is_first and failure is None:
            failure = self._start()
        for name in self.metas:
            whole = gathered(leaves[name], name, processes)
            if whole is not None and failure is None:
                failure = self._append(whole)
            del whole
        return failure

    def _start(self) -> OSError | None:
        """Write the header."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, meta in self.metas.items():
            end = start + _size(meta)
            header[name] = {"dtype": _NAMES[meta.dtype], "shape": meta.shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors are aligned
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.temporary.write_bytes(len(text).to_bytes(8, "little") + text)
        except OSError as error:
            return error
        return None

    def _append(self, tensor: torch.Tensor) -> OSError | None:
        data = as_bytes(tensor)
        try:
            with self.temporary.open("ab") as file:
                file.write((ctypes.c_char * data.numel()).from_address(data.data_ptr()))
        except OSError as error:
            return error
        return None


def _checked(tree: Any) -> dict[str, torch.Tensor]:
    """The leaves of a tree by name.

    Raises:
        ShardingError, CheckpointError: as `save_safetensors`.
    """
    names, leaves, _ = named_leaves(tree)
    seen: dict[int, str] = {}
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise CheckpointError(f"Leaf {name} must be a tensor (got {type(leaf).__name__}). {leaf_remedy(leaf)}")
        if isinstance(leaf, DTensor):
            check_final(leaf.spec, name)
            require_shards(leaf)
        elif leaf.is_meta or leaf.layout is not torch.strided:
            kind = "a meta tensor" if leaf.is_meta else f"layout {leaf.layout}"
            raise CheckpointError(f"Leaf {name} must be a dense tensor with data (got {kind}).")
        if leaf.dtype not in _NAMES:
            raise CheckpointError(f"Leaf {name} has the dtype {leaf.dtype}, which safetensors lacks. Convert it.")
        if (other := seen.setdefault(id(leaf), name)) != name:
            raise CheckpointError(
                f"Leaves {other} and {name} are one tensor, which safetensors would store twice. Leave one out, as "
                "transformers does with tied weights."
            )
    return dict(zip(names, leaves, strict=True))


def _size(meta: TensorMeta) -> int:
    return torch.Size(meta.shape).numel() * meta.dtype.itemsize


def _files(path: Path, metas: Mapping[str, TensorMeta], limit: int) -> list[_File]:
    """The files for tensors of these metas: one after the other is filled up to the limit, as transformers does."""
    groups: list[dict[str, TensorMeta]] = [{}]
    for name, meta in metas.items():
        if groups[-1] and sum(map(_size, groups[-1].values())) + _size(meta) > limit:
            groups.append({})
        groups[-1][name] = meta
    single = path if path.name.endswith(FILE) else path / SINGLE
    stem, token = single.name.removesuffix(FILE), uuid.uuid4().hex[:12]
    numbered = [f"{stem}-{number:05}-of-{len(groups):05}{FILE}" for number in range(1, len(groups) + 1)]
    return [
        _File(single.with_name(name), _in_order(group), single.with_name(f"tmp-{name}-{token}"))
        for name, group in zip(numbered if len(groups) > 1 else [single.name], groups, strict=True)
    ]


def _in_order(metas: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    """The tensors in the order of a file: larger elements first, so that all are aligned."""
    return dict(sorted(metas.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def _finish(path: Path, files: Sequence[_File], failure: OSError | None) -> None:
    """Give the files their names, and remove those of an earlier save; its index first, which might name new files."""
    if failure is not None:
        raise CheckpointError(f"Saving to {path} failed: {type(failure).__name__}: {failure}") from failure
    single = path if path.name.endswith(FILE) else path / SINGLE
    index = single.with_name(single.name + INDEX)
    for file in files:
        with file.temporary.open("rb") as opened:
            os.fsync(opened.fileno())
    if len(files) > 1:
        for old in (index, single):
            old.unlink(missing_ok=True)
    for file in files:
        os.replace(file.temporary, file.path)
    if len(files) > 1:
        _write_index(index, files)
    else:
        index.unlink(missing_ok=True)
    for old in set(_numbered(single)) - {file.path for file in files}:
        old.unlink(missing_ok=True)
    sync(single.parent)


def _write_index(index: Path, files: Sequence[_File]) -> None:
    homes = {name: file.path.name for file in files for name in file.metas}
    total = sum(_size(meta) for file in files for meta in file.metas.values())
    temporary = index.with_name(f"tmp-{index.name}-{uuid.uuid4().hex[:12]}")
    with temporary.open("w") as opened:
        json.dump({"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}, opened, indent=2)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(temporary, index)


def _numbered(single: Path) -> Iterator[Path]:
    """The numbered files of a save."""
    return single.parent.glob(f"{single.name.removesuffix(FILE)}-?????-of-?????{FILE}")
