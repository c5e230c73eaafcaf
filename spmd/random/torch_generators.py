"""Keys from torch's generators, and generators from keys."""

from __future__ import annotations

import torch

from spmd.errors import SpmdError
from spmd.job.user_code import user_line
from spmd.random.keys import DEFAULT_IMPL, Key, key, used
from spmd.random.samples import bits

_SEEDS = -(2**63), 2**63 - 1


def from_generator(generator: torch.Generator | None = None, *, impl: str = DEFAULT_IMPL) -> Key:
    """Make a key of a seed that a generator of torch draws; ranks need generators of equal states, as for other draws.

    It advances the generator, so the next key is another one. `key(generator.initial_seed())` does not.

    Args:
        generator: by default the one that `torch.manual_seed` seeds.
        impl: the generator of the key.

    Raises:
        SpmdError: no generator, or an unknown `impl`.

    >>> _ = torch.manual_seed(0)
    >>> bool(from_generator() == from_generator()), bool(from_generator(torch.manual_seed(1)) == from_generator())
    (False, False)
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        got = type(generator).__name__
        raise SpmdError(f"spmd.random.from_generator at {user_line()} expects a torch.Generator (got {got}).")
    device = None if generator is None else generator.device
    return key(torch.randint(*_SEEDS, (), generator=generator, device=device), impl=impl)


def to_generator(key: Key, device: torch.device | str | None = None) -> torch.Generator:
    """Make a generator of torch, seeded by 64 bits that a key draws: for functions that take a `torch.Generator`.

    Args:
        key: a single key, which is not to be used again. It has a value, so it is none in a program that is traced.
        device: that of the generator, by default the key's.

    Raises:
        SpmdError: no single key, or one without a value.

    >>> import spmd
    >>> torch.randn(2, generator=to_generator(spmd.random.key(0)))
    tensor([...])
    """
    data = used(key, "to_generator")
    words = bits(Key(data, key.impl), (), torch.uint64).view(torch.int64)
    return torch.Generator(device or data.device).manual_seed(int(words))
