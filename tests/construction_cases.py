"""What the ranks of tests/api/test_construction.py run: functions that workers import."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import spmd
from spmd import P
from spmd.core.pytree import tree_leaves

LAYERS, WIDTH = 16, 2048
"""A model of 256 MiB: one matrix a layer."""


def peak_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """The most resident bytes during a call, beside those before it, and what it returns; Linux only."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier cases freed counts no more
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _memory("VmRSS")
    result = call()
    return _memory("VmHWM") - before, result


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def shard_bytes(tree: Any) -> int:
    return sum(shard.nbytes for leaf in tree_leaves(tree) for shard in leaf.shards)


def model(device: str) -> torch.nn.Module:
    with torch.device(device):
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers).requires_grad_(False)


SPECS = {"rows": P("data"), "columns": P(None, ("model", "data")), "one axis": P("model"), "replicated": P()}


def memory_of_distribute(name: str) -> tuple[int, int]:
    """The peak beside what was there before, and the bytes of the shards, of `distribute(tree, src_rank=0)`."""
    mesh, spec = spmd.make_mesh({"data": 2, "model": 2}), SPECS[name]
    is_source = spmd.process_index() == 0
    spmd.distribute(torch.ones(4, 4), spec, mesh, src_rank=0)  # process groups
    tree = dict(model("cpu" if is_source else "meta").named_parameters())
    peak, placed = peak_of(lambda: spmd.distribute(tree, spec, mesh, src_rank=0))
    return peak, shard_bytes(placed)
