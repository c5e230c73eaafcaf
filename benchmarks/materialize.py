"""What a process holds while `spmd.materialize` initializes a model of 2 GB, by its own initializers.

    python benchmarks/materialize.py                        # four processes: FSDP, by keys; about a minute
    python benchmarks/materialize.py --rng torch            # the numbers of one device
    python benchmarks/materialize.py --init orthogonal      # an initializer that needs tensors whole
    python benchmarks/materialize.py --layers 2             # a smaller model

The bound is the shards of a rank and the largest parameter, and 15% of both, beside what was resident before. The exit
status is 1 if a rank exceeds it.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Literal

import attrs
import torch
from torch import nn

import spmd

WIDTH, VOCABULARY = 1536, 32_000


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 16, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head tied to the embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(1024, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight


def orthogonal(model: nn.Module) -> None:
    """Make matrices orthogonal, and all else one."""
    for parameter in model.parameters():
        (nn.init.orthogonal_ if parameter.ndim == 2 else nn.init.ones_)(parameter)


@attrs.frozen
class Memory:
    """Bytes of one process.

    Args:
        before: what is resident before, beside the module on the meta device.
        peak: the most that was.
        shards: what its parameters take.
        largest: the largest parameter, unsharded.
        seconds: how long the call took.
    """

    before: int
    peak: int
    shards: int
    largest: int
    seconds: float

    @property
    def bound(self) -> float:
        """What may be resident."""
        return self.before + 1.15 * (self.shards + self.largest)

    def __str__(self) -> str:
        sizes = attrs.asdict(self) | {"bound": self.bound}
        seconds = sizes.pop("seconds")
        return ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in sizes.items()) + f"; {seconds:.0f} s"


def measure(layers: int, rng: Literal["torch", "counter"], init: str) -> list[Memory]:
    """The memory of all ranks."""
    mesh = spmd.make_mesh({"data": spmd.process_count()})
    with torch.device("meta"):
        model = GPT(layers)
    torch.manual_seed(0)
    spmd.materialize(nn.Linear(2, 2, device="meta"), mesh=mesh)  # process groups, and what is imported at first use
    before, start = _memory("VmRSS"), time.monotonic()
    initializer = orthogonal if init == "orthogonal" else None
    spmd.materialize(model, spmd.fsdp_specs(model, "data"), mesh, init=initializer, rng=rng)
    seconds, parameters = time.monotonic() - start, list(model.parameters())
    shards = sum(x.shards[0].nbytes for x in parameters)
    own = Memory(before, _memory("VmHWM"), shards, max(x.nbytes for x in parameters), seconds)
    found: list[Memory] = [own] * spmd.process_count()
    torch.distributed.all_gather_object(found, own)
    return found


def _memory(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> int:
    """Measure and print; 1 if a rank exceeds the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rng", choices=["counter", "torch"], default="counter")
    parser.add_argument("--init", choices=["own", "orthogonal"], default="own")
    options = parser.parse_args()
    found = spmd.launch(measure, options.ranks, options.layers, options.rng, options.init)
    for rank, memory in enumerate(found):
        print(f"rank {rank}: {memory}")
    return int(any(memory.peak > memory.bound for memory in found))


if __name__ == "__main__":
    raise SystemExit(main())
