"""Streams of 32-bit words: those of one key, and of the many keys that are made of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from spmd.random import Key, bits, fold_in, key, split, wrap_key_data
from spmd.random.generators.draw import DRAW

STREAMS = ("one key", "split", "folded")
"""One draw; the leaves of a tree of keys, each split in two; numbers of a step and of a layer folded in."""

_PART, _LEVELS, _WORDS_OF_A_KEY = 2**22, 18, 16


def write(file: Path, stream: str, impl: str, size: int, seed: int) -> None:
    """Write so many bytes of a stream."""
    root, written = key(seed, impl=impl), 0
    with file.open("wb") as target:
        for number in range(-(-size // (4 * _PART))):
            found = _part(root, stream, number).view(torch.uint8).numpy().tobytes()
            written += target.write(found[: size - written])


def _part(root: Key, stream: str, number: int) -> Tensor:
    """Words of a stream, i32[_PART]: those with this number."""
    if stream == "one key":
        return DRAW(root.data, [_PART], "bits", torch.int32, root.impl, [1], torch.tensor(number * _PART))  # type: ignore[no-any-return]
    keys = _leaves(fold_in(root, number)) if stream == "split" else _steps(root, number)
    return torch.func.vmap(lambda own: bits(own, (_WORDS_OF_A_KEY,)).view(torch.int32))(keys).flatten()


def _leaves(root: Key) -> Key:
    """2^_LEVELS keys, each half of one that was split."""
    keys = _listed(root)
    for _ in range(_LEVELS):
        keys = _listed(torch.func.vmap(split)(keys))
    return keys


def _steps(root: Key, number: int) -> Key:
    """As many keys: of 512 steps, each of 512 layers."""
    count = 2 ** (_LEVELS // 2)
    each = torch.func.vmap(fold_in, in_dims=(None, 0))
    steps = each(root, torch.arange(number * count, (number + 1) * count))
    return _listed(torch.func.vmap(each, in_dims=(0, None))(steps, torch.arange(count)))


def _listed(keys: Key) -> Key:
    """Keys as an array of one dim."""
    return wrap_key_data(keys.data.reshape(-1, 2), impl=keys.impl)
