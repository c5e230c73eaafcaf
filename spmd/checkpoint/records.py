"""Reads DCP's `.metadata`, which is a pickle, as a plain document, without running code in it.

The unpickler here makes inert records for the few classes that DCP writes, and imports and calls nothing; any other
name in a pickle is an error. It derives from the unpickler in Python, because the one in C allocates any size that a
damaged file states.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from spmd.checkpoint.contents import Document
from spmd.errors import CheckpointError

_METADATA = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.metadata": _METADATA,
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}
"""The names that a `.metadata` may contain, by module, besides dtypes."""


class _Record:
    """A stand-in for an object in a pickle: the arguments of its constructor, and its state.

    Every unpickler makes its own subclasses, because a pickle can set attributes of classes.
    """

    name: ClassVar[str]
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _Record:
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The class of records for a known name, or a dtype; an error for any other name."""
        if name in _KNOWN.get(module, ()):
            return self._classes.setdefault((module, name), type(name, (_Record,), {"name": name}))
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


def read_records(data: bytes) -> Document:
    """The document that `spmd.checkpoint.contents.parse` takes, from the bytes of a `.metadata`.

    Raises:
        CheckpointError: the bytes are no pickle of DCP's metadata, or contain other names.
    """
    file = io.BytesIO(data)
    try:
        metadata = _Unpickler(file).load()
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error
    rest = len(data) - file.tell()
    if rest:
        raise CheckpointError(f"{rest} bytes follow its end")
    found = _state(metadata, "Metadata")
    parts = _parts(_get(found, "storage_data"))
    tensors, values = {}, {}
    for name, record in _items(_get(found, "state_dict_metadata")):
        _text(name)
        if isinstance(record, _Record) and record.name == "BytesStorageMetadata":
            values[name] = _find(parts, (name, None))
        else:
            tensors[name] = _tensor(name, record, parts)
    return {"tensors": tensors, "values": values}


_Parts = dict[tuple[Any, Any], Document]


def _parts(stored: Any) -> _Parts:
    parts: _Parts = {}
    for index, info in _items(stored):
        place, found = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        if found.get("transform_descriptors"):
            raise CheckpointError("its data is compressed or otherwise transformed, which is not supported here")
        offset = place.get("offset")
        key = _text(_get(place, "fqn")), None if offset is None else tuple(_numbers(offset))
        if key in parts:
            raise CheckpointError(f"{key[0]!r} is stored twice at {key[1]}")
        names = {"file": "relative_path", "offset": "offset", "length": "length"}
        parts[key] = {**{name: _get(found, field) for name, field in names.items()}, "crc32": found.get("crc32")}
    return parts


def _tensor(name: str, record: Any, parts: _Parts) -> Document:
    found = _state(record, "TensorStorageMetadata")
    properties = _get(found, "properties")
    state = properties.state if isinstance(properties, _Record) and properties.name == "TensorProperties" else None
    if not (isinstance(state, tuple) and state and isinstance(state[0], torch.dtype)):
        raise CheckpointError(f"{name!r} has no dtype")
    chunks = []
    for chunk in _list(_get(found, "chunks")):
        box = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _numbers(_get(box, "offsets")), _numbers(_get(box, "sizes"))
        chunks.append({"offsets": offsets, "sizes": sizes, **_find(parts, (name, tuple(offsets)))})
    dtype = str(state[0]).removeprefix("torch.")
    return {"dtype": dtype, "shape": _numbers(_get(found, "size")), "chunks": chunks}


def _find(parts: _Parts, key: tuple[str, tuple[int, ...] | None]) -> Document:
    if key not in parts:
        raise CheckpointError(f"it does not say where {key[0]!r}{'' if key[1] is None else f' at {key[1]}'} is stored")
    return parts[key]


def _state(record: Any, name: str) -> dict[Any, Any]:
    """The state of a record, which must be of the class `name`."""
    if not isinstance(record, _Record) or record.name != name or type(record.state) is not dict:
        found = record.name if isinstance(record, _Record) else type(record).__name__
        raise CheckpointError(f"it has {found} where {name} is expected")
    return record.state


def _get(fields: Mapping[Any, Any], name: str) -> Any:
    if name not in fields:
        raise CheckpointError(f"a field {name!r} is missing")
    return fields[name]


def _items(mapping: Any) -> list[tuple[Any, Any]]:
    if type(mapping) is not dict:
        raise CheckpointError(f"it has {type(mapping).__name__} where a dict is expected")
    return list(mapping.items())


def _text(value: Any) -> str:
    if type(value) is not str:
        raise CheckpointError(f"it has {type(value).__name__} where a name is expected")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise CheckpointError(f"it has {type(value).__name__} where a list is expected")
    return value


def _numbers(value: Any) -> list[int]:
    """A torch.Size or tuple, as a list."""
    if isinstance(value, _Record) and value.name == "Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    if type(value) is not tuple or not all(type(number) is int for number in value):
        raise CheckpointError("it has something else where sizes are expected")
    return list(value)
