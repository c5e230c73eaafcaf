"""Real text that every machine has: the sources of the running Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch
from torch import Tensor

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
HELD_OUT_EVERY = 10
"""One file in so many is held out."""


@attrs.frozen(eq=False)
class Corpus:
    """Text as uint8 vectors, split by file."""

    train: Tensor
    held_out: Tensor
    files: int


def read(megabytes: float = 4.0) -> Corpus:
    """Read about so many megabytes of source files, in order of their paths, split into train and held-out files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    paths = sorted(path for path in root.rglob("*.py") if not SKIPPED.intersection(path.relative_to(root).parts))
    files = 0
    for files, path in enumerate(paths, start=1):
        parts[files % HELD_OUT_EVERY == 0].extend(path.read_bytes())
        if sum(map(len, parts)) >= megabytes * 1e6:
            break
    train, held_out = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return Corpus(train, held_out, files)


def batches(text: Tensor, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows at random places, without end: tokens and the tokens that follow, int64 `[batch, context]` each.

    The same seed draws the same windows.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        window = text[starts + torch.arange(context + 1)].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
