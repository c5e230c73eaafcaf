"""Loading safetensors files, of Hugging Face's models and others, each rank its shards."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from spmd.api.values.checkpointable import check_final
from spmd.api.values.dtensor import DTensor, wrap
from spmd.checkpoint.leaves import named_leaves
from spmd.checkpoint.processes import processes_of
from spmd.core.mesh import Mesh, Runtime, current_mesh
from spmd.core.pytree import SpecLike, is_spec, make_spec
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.errors import CheckpointError, MeshError, ShardingError
from spmd.job.tracebacks import hides_internals

INDEX = ".index.json"
"""The end of the name of the file that says which of several files has which tensor."""

FILE = ".safetensors"
"""The end of the name of a file with tensors."""

SINGLE = "model.safetensors"
"""The file in a folder; several are named after it, as is their index."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The dtypes of the format, by their names in it."""


@hides_internals
def load_safetensors(
    path: str | os.PathLike[str], specs: object, mesh: Mesh | None = None, *, dtype: torch.dtype | None = None
) -> dict[str, DTensor]:
    """Load the tensors of safetensors files as DTensors; each rank reads its shards only.

    On a distributed mesh this is a collective call. An error on one rank, such as a file that it lacks, is raised on
    all. It needs the package `safetensors`.

    Args:
        path: a file `*.safetensors`; an index `*.safetensors.index.json` of several; or a folder with
            `model.safetensors` or its index, as transformers writes it.
        specs: the specs, none partial: one for all tensors, a dict by their names, or a tree whose paths, joined by
            dots, are the names. Tensors without a spec are replicated.
        mesh: the mesh; by default that of `use_mesh`.
        dtype: the dtype of floating-point tensors; by default that in the file. Others keep theirs.

    Returns:
        The tensors by their names in the files.

    Raises:
        CheckpointError: no such file, one that is damaged, or specs that do not fit; the message lists names in `specs`
            that the files lack, with those that are nearest.
        DivergenceError: ranks have other paths, specs or files.
        MeshError: no mesh, or an abstract one.
        ImportError: the package `safetensors` is not installed.

    >>> import spmd, tempfile
    >>> mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     spmd.save_safetensors({"w": torch.ones(3, 2), "b": torch.zeros(2)}, folder)
    ...     spmd.load_safetensors(folder, {"w": P("data")}, mesh)["w"]
    DTensor(f32[3,2] P('data') on Mesh(data=2), shards [2,2] [1,2])
    """
    mesh = current_mesh(mesh)
    if mesh.runtime is Runtime.ABSTRACT:
        raise MeshError(f"Nothing can be loaded onto the abstract {mesh}. Load onto a virtual or a distributed mesh.")
    processes = processes_of("load_safetensors", [mesh])
    files = processes.together(lambda: _Files.find(Path(path)))
    targets = processes.together(lambda: _targets(files, specs, mesh, dtype))
    claims = {f"tensor {name}": f"{spec} on {spec.mesh}" for name, spec in targets.items()}
    processes.agree(lambda: {"the path": os.fspath(path), **claims, "the files": files.digest})
    return processes.together(lambda: files.read(targets))


@attrs.frozen
class _Files:
    """Files of tensors.

    Args:
        path: what the user calls them.
        homes: the file of each tensor, by its name.
        metas: the meta of each tensor, by its name.
        digest: of the headers of the files, for comparisons between ranks.
    """

    path: Path
    homes: Mapping[str, Path]
    metas: Mapping[str, TensorMeta]
    digest: str

    @classmethod
    def find(cls, path: Path) -> _Files:
        """The files that a path names.

        Raises:
            CheckpointError: there are none, or one is damaged.
        """
        main = _main_file(path)
        homes = _homes(main) if main.name.endswith(INDEX) else dict.fromkeys(_names(main), main)
        metas: dict[str, TensorMeta] = {}
        for file in sorted(set(homes.values())):
            wanted = [name for name, home in homes.items() if home == file]
            with _opened(file) as opened:
                if lacking := sorted(set(wanted).difference(opened.keys())):
                    raise CheckpointError(f"{file} lacks {', '.join(lacking[:5])}, which {main} says it has.")
                metas |= {name: _meta(file, name, opened.get_slice(name)) for name in wanted}
        text = repr([(name, home.name, metas[name], home.stat().st_size) for name, home in sorted(homes.items())])
        return cls(path, homes, metas, hashlib.sha256(text.encode()).hexdigest())

    def read(self, targets: Mapping[str, DTensorSpec]) -> dict[str, DTensor]:
        """The tensors with these specs, of which only the shards of this process are read."""
        found = {}
        for file in sorted(set(self.homes.values())):
            with _opened(file) as opened:
                for name in (name for name, home in self.homes.items() if home == file):
                    found[name] = _read(opened.get_slice(name), targets[name])
        return {name: found[name] for name in self.homes}


def _main_file(path: Path) -> Path:
    """The file with the tensors, or with the index, that a path names."""
    candidates = [path / SINGLE, path / f"{SINGLE}{INDEX}"] if path.is_dir() else [path]
    for file in candidates:
        if file.is_file() and file.name.endswith((FILE, INDEX)):
            return file
    names = ", ".join(file.name for file in candidates)
    raise CheckpointError(
        f"There is no safetensors file at {path} (looked for {names}). Give a file *{FILE}, an index *{INDEX}, or a "
        f"folder with {SINGLE} or {SINGLE}{INDEX}."
    )


def _homes(index: Path) -> dict[str, Path]:
    """The file of each tensor by an index; files are beside the index."""
    try:
        homes = json.loads(index.read_bytes())["weight_map"]
        if not all(isinstance(file, str) and file == Path(file).name for file in homes.values()):
            raise ValueError("its weight_map has other than names of files beside it")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {type(error).__name__}: {error}. Write it again.") from error
    return {name: index.with_name(file) for name, file in homes.items()}


def _names(file: Path) -> list[str]:
    with _opened(file) as opened:
        return sorted(opened.keys())


def _opened(file: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("safetensors files are read by the package safetensors: pip install safetensors.") from error
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no file {file}. Copy all files of the model to every machine.") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {error}. Write it again.") from error


def _meta(file: Path, name: str, part: Any) -> TensorMeta:
    dtype = DTYPES.get(part.get_dtype())
    if dtype is None:
        raise CheckpointError(
            f"{name} in {file} has the dtype {part.get_dtype()} (expected {', '.join(DTYPES)}). Convert the file."
        )
    return TensorMeta(tuple(part.get_shape()), dtype)


def _targets(files: _Files, specs: Any, mesh: Mesh, dtype: torch.dtype | None) -> dict[str, DTensorSpec]:
    """The spec of each tensor."""
    given: dict[str, SpecLike] = dict.fromkeys(files.metas, specs) if is_spec(specs) else {}
    if not is_spec(specs):
        names, leaves, _ = named_leaves(specs, is_leaf=is_spec)
        given = dict(zip(names, leaves, strict=True))
    wrong = [_missing(name, files.metas) for name in given if name not in files.metas]
    targets = {}
    for name, meta in files.metas.items():
        if dtype is not None and meta.dtype.is_floating_point:
            meta = attrs.evolve(meta, dtype=dtype)
        try:
            targets[name] = make_spec(mesh, given.get(name, P()), meta, where=name)
            check_final(targets[name], name)
        except ShardingError as error:
            wrong.append(str(error))
    if wrong:
        raise CheckpointError("\n  ".join([f"The specs do not fit the tensors in {files.path}:", *wrong]))
    return targets


def _missing(name: str, found: Mapping[str, TensorMeta]) -> str:
    nearest = difflib.get_close_matches(name, found, n=3, cutoff=0.4)
    return f"{name}: missing; the nearest are {', '.join(nearest)}" if nearest else f"{name}: missing"


def _read(part: Any, spec: DTensorSpec) -> DTensor:
    """A tensor of which only the shards of this process are read; `part` reads what it is indexed by."""
    mesh = spec.mesh
    parts = (part[spec.local_slices(coordinate)] for coordinate in mesh.held_coordinates)  # views of the file
    copy = functools.partial(torch.Tensor.to, copy=True, memory_format=torch.contiguous_format)
    return wrap(spec, tuple(copy(part, mesh.device, spec.meta.dtype) for part in parts))
