"""What the processes of a job say, compared: one small collective before anything large depends on it."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd.errors import DivergenceError
from spmd.spec import TensorMeta

WHOLE = 1 << 24
"""Tensors of up to so many bytes are compared whole, larger ones by blocks."""

BLOCKS, BLOCK = 256, 1 << 16
"""How many blocks of a large tensor, evenly spaced, and of how many bytes."""


def gather(value: Any) -> list[Any]:
    """What every process gives (anything that can be pickled), in rank order, on all of them."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_agreement(claims: Mapping[str, str], expected: str) -> None:
    """Compare what all processes say of the same things.

    Args:
        claims: for each thing, by its name, what this process says of it: a short description or a digest.
        expected: what was expected of all and what to do, for the message.

    Raises:
        DivergenceError: on every rank, if they differ; with the first difference, and which ranks say what.
    """
    every: list[dict[str, str]] = gather(dict(claims))
    for name in dict.fromkeys(name for given in every for name in given):
        said = [given.get(name, "nothing") for given in every]
        if len(set(said)) > 1:
            raise DivergenceError(f"{name} differs between ranks: {who_says_what(said)}. {expected}")


def who_says_what(said: Sequence[str]) -> str:
    """What was said, and by which ranks.

    >>> who_says_what(["f32[2]", "f32[3]", "f32[2]"])
    'f32[2] on ranks 0, 2; f32[3] on rank 1'
    """
    parts = []
    for text in dict.fromkeys(said):
        ranks = [str(rank) for rank, other in enumerate(said) if other == text]
        parts.append(f"{text} on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}")
    return "; ".join(parts)


def describe(value: Any) -> str:
    """The meta of a tensor and a digest of its bytes; of anything else, its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_meta or value.layout is not torch.strided:
        return f"{TensorMeta.of(value)} ({'meta' if value.is_meta else value.layout})"
    return f"{TensorMeta.of(value)} with digest {digest(value)}"


def digest(value: Tensor) -> str:
    """Eight hexadecimal digits that say which elements a dense tensor holds; large tensors are sampled."""
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    if flat.numel() > WHOLE:
        stride = (flat.numel() - BLOCK) // (BLOCKS - 1)
        flat = flat.as_strided((BLOCKS, BLOCK), (stride, 1)).reshape(-1)
    flat = flat.cpu()
    found = hashlib.blake2b(digest_size=4)
    if flat.numel():  # numpy is no dependency, so the bytes are reached by their address
        found.update((ctypes.c_char * flat.numel()).from_address(flat.data_ptr()))
    return found.hexdigest()
