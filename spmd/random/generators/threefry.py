"""Threefry2x32 with 20 rounds (Salmon et al. 2011), with the bits of `jax.random` in its partitionable form.

A key is two 32-bit words, held in 64-bit integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd.random.generators.philox import WORD

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def blocks(key: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
    """The two words of each counter, as int32.

    Args:
        key: i64[..., 2].
        counters: i64, broadcasts with the first dims of `key`.

    >>> [int(word) & WORD for word in blocks(torch.tensor([0, 0]), torch.tensor(0))]
    [1797259609, 2579123966]
    """
    first, second = (key[..., number].to(torch.int32) for number in (0, 1))
    schedule = first, second, first ^ second ^ _PARITY
    a = (counters >> 32).to(torch.int32) + schedule[0]
    b = counters.to(torch.int32) + schedule[1]
    for number in range(5):
        for count in _ROTATIONS[number % 2]:
            a += b
            low = (b >> (32 - count)).bitwise_and_((1 << count) - 1)
            b.bitwise_left_shift_(count).bitwise_or_(low).bitwise_xor_(a)
        a += schedule[(number + 1) % 3]
        b += schedule[(number + 2) % 3] + (number + 1)
    return a, b


def patterns(key: Tensor, counters: Tensor, width: int) -> Tensor:
    """Integers of `width` bits, one of each counter in a new last dim."""
    high, low = blocks(key, counters)
    if width == 64:
        return (high.to(torch.int64) << 32 | low.to(torch.int64) & WORD).unsqueeze(-1)
    return high.bitwise_xor_(low).to(_DTYPES[width]).unsqueeze(-1)


_DTYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32}


def per_counter(width: int) -> int:
    """How many integers of `width` bits a counter is worth."""
    return 1


def derived(key: Tensor, data: Tensor) -> Tensor:
    """The keys that numbers `data`, of which 32 bits count, make of keys: those of `jax.random.fold_in`."""
    return torch.stack([word.to(torch.int64) & WORD for word in blocks(key, data & WORD)], dim=-1)


def seeded(seed: Tensor) -> Tensor:
    """The key of a seed, of which the low 32 bits count, as in JAX with its default 32-bit integers."""
    return torch.stack([torch.zeros_like(seed), seed & WORD], dim=-1)


def mantissa_width(dtype: torch.dtype) -> int:
    """The bits that an element of a floating dtype is drawn from: 8 for bfloat16, whose mantissa has 7."""
    return 8 if dtype == torch.bfloat16 else 8 * dtype.itemsize
