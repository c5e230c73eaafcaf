"""Checksums of tensors, computed where they are: on the host by address, elsewhere by operators on the device."""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from spmd.collectives.transport.transport_dtypes import viewed

BLOCK = 1 << 20
"""The number of words that are multiplied at once on a device."""


def checksums(values: Sequence[Tensor]) -> list[int]:
    """A checksum of the elements of each dense tensor, whatever its strides; the device is waited for once.

    Equal tensors on devices of one type have equal checksums. Those on the host have 32 bits, others 64.
    """
    found = [_of_memory(flat) if flat.is_cpu else of_words(flat) for flat in map(as_bytes, values)]
    on_device = [item for item in found if isinstance(item, Tensor)]
    fetched = iter(torch.stack(on_device).tolist() if on_device else ())
    return [next(fetched) if isinstance(item, Tensor) else item for item in found]


def as_bytes(value: Tensor) -> Tensor:
    """The bytes of the elements, in their order."""
    return viewed(value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous(), torch.uint8)


def _of_memory(flat: Tensor) -> int:
    if not flat.numel():
        return 0
    return zlib.crc32((ctypes.c_char * flat.numel()).from_address(flat.data_ptr()))  # numpy is no dependency


def of_words(flat: Tensor) -> Tensor:
    """The checksum of bytes by operators alone: words of 32 bits times random odd weights, summed modulo 2^64.

    This is multilinear hashing (Lemire and Kaser, The Computer Journal 57, 2014): any one word that differs is seen,
    others but with a probability of 2^-32.
    """
    if rest := -flat.numel() % 4:
        flat = torch.nn.functional.pad(flat, (0, rest))
    words = (flat.clone() if flat.storage_offset() % 4 else flat).view(torch.int32)
    weights = _weights(flat.device)
    sums = [(block * weights[: block.numel()]).sum() for block in words.split(BLOCK)]
    return (torch.stack(sums) * weights[: len(sums)]).sum()


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(1 << 63), (1 << 63) - 1, (BLOCK,), dtype=torch.int64, generator=generator)
    return (weights | 1).to(device)
