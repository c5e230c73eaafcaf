"""Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

A key is two 64-bit numbers, a seed and the first counter. `torch.func._random` of torch 2.13 derives the same keys. The
words are those of its kernels where the counter is zero, as of a seed; in them the second number counts words, not
counters, when they draw. Floats are JAX's: torch's are of other bits of a word, and normal ones of another formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def blocks(key: Tensor, counters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words of each counter, new tensors; of the second and the fourth only the low 32 bits count.

    Args:
        key: i64[..., 2].
        counters: i64, broadcasts with the first dims of `key`. It is overwritten.

    >>> words = blocks(torch.tensor([0, 0]), torch.tensor([0]))
    >>> [hex(int(word) & WORD) for word in words]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    rounds = torch.arange(_ROUNDS, device=key.device)
    halves = key[..., :1] & WORD, (key[..., :1] >> 32) & WORD
    schedules = [(half + rounds * step & WORD).unbind(-1) for half, step in zip(halves, _INCREMENTS, strict=True)]
    counters += key[..., 1]
    a, b = counters & WORD, counters.bitwise_right_shift_(32).bitwise_and_(WORD)
    (first, second), *later = zip(*schedules, strict=True)
    # The last two words of a counter are zero, so one product of the first round is.
    d = a * _MULTIPLIERS[0]
    c = (d >> 32).bitwise_and_(WORD).bitwise_xor_(second)
    a, b, spare = b.bitwise_xor_(first), torch.zeros_like(a), torch.empty_like(a)
    for first, second in later:
        # A product of 32-bit words wraps to its low 64 bits. Words are masked where they are multiplied next.
        torch.mul(a, _MULTIPLIERS[0], out=spare)
        torch.mul(c, _MULTIPLIERS[1], out=a)
        torch.bitwise_right_shift(spare, 32, out=c).bitwise_xor_(d).bitwise_xor_(second).bitwise_and_(WORD)
        torch.bitwise_right_shift(a, 32, out=d).bitwise_xor_(b).bitwise_xor_(first).bitwise_and_(WORD)
        a, b, d, spare = d, a, spare, b
    return a, b, c, d


def patterns(key: Tensor, counters: Tensor, width: int) -> Tensor:
    """Integers of `width` bits, `per_counter(width)` of each counter in a new last dim.

    Of 64 bits, the earlier word is the high half, as in torch's kernels; of fewer than 32 it is cut from its low end.
    """
    pairs = blocks(key, counters)
    if width == 64:
        return torch.stack([first << 32 | second & WORD for first, second in (pairs[:2], pairs[2:])], dim=-1)
    both = [second.bitwise_left_shift_(32).bitwise_or_(first) for first, second in (pairs[:2], pairs[2:])]
    return torch.stack(both, dim=-1).view(_DTYPES[width])


_DTYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32}


def per_counter(width: int) -> int:
    """How many integers of `width` bits a counter is worth."""
    return 128 // width


def derived(key: Tensor, data: Tensor) -> Tensor:
    """The keys that numbers `data` make of keys, as torch's `_philox_key_fold_in` does."""
    if key.numel() == 2 and data.numel() == 1 and data.device.type == "cpu":  # nine times as fast
        seed, first = key.flatten().tolist()
        return torch.tensor(_folded(seed, first, int(data))).view(*data.shape, 2)
    words = blocks(key, data.clone())
    return torch.stack([low & WORD | high << 32 for low, high in (words[:2], words[2:])], dim=-1)


def _folded(seed: int, first: int, number: int) -> tuple[int, int]:
    """One key that a number makes of one: as `blocks`, of Python's integers."""
    counter, keys = first + number, [seed & WORD, seed >> 32 & WORD]
    a, b, c, d = counter & WORD, counter >> 32 & WORD, 0, 0
    for _ in range(_ROUNDS):
        low, high = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = high >> 32 ^ b ^ keys[0], high & WORD, low >> 32 ^ d ^ keys[1], low & WORD
        keys = [key + step & WORD for key, step in zip(keys, _INCREMENTS, strict=True)]
    pairs = (a | b << 32, c | d << 32)
    return tuple(pair - 2**64 if pair >= 2**63 else pair for pair in pairs)  # type: ignore[return-value]


def seeded(seed: Tensor) -> Tensor:
    """The key of a seed, of which all 64 bits count."""
    return torch.stack([seed, torch.zeros_like(seed)], dim=-1)


def mantissa_width(dtype: torch.dtype) -> int:
    """The bits that an element of a floating dtype is drawn from."""
    return 64 if dtype == torch.float64 else 32
