"""Reads chunks and plain values from the bytes of `torch.save`, without running code in them."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch

from spmd.core.spec import TensorMeta
from spmd.core.value_types import VALUES
from spmd.errors import CheckpointError

_ZIP = b"PK\x03\x04"


def read_tensor(data: bytes, expected: TensorMeta) -> torch.Tensor:
    """The tensor that `torch.save` wrote to `data`.

    Raises:
        CheckpointError: `data` is damaged, or is not a plain tensor of the expected shape and dtype.
    """
    tensor = _load(data)
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"it is {type(tensor).__name__} and no tensor")
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or TensorMeta.of(tensor) != expected:
        raise CheckpointError(f"it is {type(tensor).__name__} {TensorMeta.of(tensor)}, expected {expected}")
    return tensor.detach()


def read_value(data: bytes) -> Any:
    """The number or text that `torch.save` wrote to `data`.

    Raises:
        CheckpointError: `data` is damaged, or holds something else.
    """
    value = _load(data)
    if type(value) not in VALUES:
        raise CheckpointError(f"it is {type(value).__name__} and not a number or text")
    return value


def check_archive(data: bytes) -> None:
    """Check the checksums in the zip archive that `torch.save` wrote, which `torch.load` does not.

    Raises:
        CheckpointError: `data` is damaged.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
    except Exception as error:
        raise CheckpointError(f"it cannot be read ({type(error).__name__}: {error})") from error
    if damaged is not None:
        raise CheckpointError("its bytes are not those that were written")


def _load(data: bytes) -> Any:
    if not data.startswith(_ZIP):
        raise CheckpointError("it is not in the form of torch.save")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        # Leave out torch's advice to load with weights_only=False, which would run code.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        reason = next((line for line in lines if line.startswith("WeightsUnpickler error")), lines[0])
        raise CheckpointError(f"it cannot be read ({type(error).__name__}: {reason})") from error
