"""What the ranks of the tests of safetensors files run: functions that workers import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from distributed_cases import error_of
from torch.utils._python_dispatch import TorchDispatchMode

import spmd
from spmd import P
from spmd.checkpoint import safetensors_loading, safetensors_saving
from spmd.job.process import process_index


def tensors() -> dict[str, torch.Tensor]:
    return {
        "layers.0.w": torch.arange(35.0).reshape(5, 7),
        "layers.0.b": torch.arange(7.0, dtype=torch.bfloat16),
        "layers.1.w": torch.arange(24).reshape(2, 3, 4),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
        "scale": torch.tensor(2.5, dtype=torch.float64),
    }


def specs(axes: tuple[str, ...]) -> dict[str, P]:
    first, last = axes[0], axes[-1]
    return {
        "layers.0.w": P(first) if first == last else P(last, first),
        "layers.0.b": P((last, first)) if first != last else P(first),
        "layers.1.w": P(None, None, axes),
        "empty": P(first),
        "flags": P(last),
    }


def save(folder: str, limit: int | str, mesh: spmd.Mesh) -> None:
    placed = spmd.distribute(tensors(), {**specs(mesh.names), "scale": P()}, mesh)
    spmd.save_safetensors(placed, folder, max_shard_size=limit)


def load(path: str, mesh: spmd.Mesh) -> dict[str, tuple[P, torch.Tensor]]:
    """The spec and the whole value of every tensor."""
    loaded = spmd.load_safetensors(path, specs(mesh.names), mesh)
    expected = spmd.distribute(tensors(), {**specs(mesh.names), "scale": P()}, mesh)
    for name, tensor in loaded.items():
        assert expected[name].spec == tensor.spec
        for one, other in zip(expected[name].shards, tensor.shards, strict=True):
            assert one.shape == other.shape and torch.equal(one, other)
    return {name: (tensor.spec.pspec, tensor.full_tensor()) for name, tensor in loaded.items()}


def bytes_held_while_saving(folder: str, mesh: spmd.Mesh) -> int:
    """The bytes of the largest tensor that this process makes in a save of one tensor."""
    placed, largest = spmd.distribute({"w": torch.ones(64, 4096)}, P(*mesh.names), mesh), 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and not isinstance(made, spmd.DTensor):
                largest = max(largest, made.nbytes)
            return made

    with Largest():
        spmd.save_safetensors(placed, folder)
    return largest


class Counted:
    """A part of a file that counts the bytes which it gives."""

    read = 0

    def __init__(self, part: Any) -> None:
        self.part = part

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self.part[index]
        Counted.read += found.nbytes
        return found


def bytes_read(folder: str, spec: P, mesh: spmd.Mesh) -> tuple[int, int, int]:
    """The bytes that are read in a load, those of the shards of this process, and those of the memory behind them."""
    read, Counted.read = safetensors_loading._read, 0
    safetensors_loading._read = lambda part, target: read(Counted(part), target)
    try:
        loaded = spmd.load_safetensors(folder, spec, mesh)
    finally:
        safetensors_loading._read = read
    shards = [shard for tensor in loaded.values() for shard in tensor.shards]
    assert all(shard.is_contiguous() for shard in shards)
    return (
        Counted.read,
        sum(shard.nbytes for shard in shards),
        sum(shard.untyped_storage().nbytes() for shard in shards),
    )


def errors(folder: str, mesh: spmd.Mesh) -> dict[str, str]:
    """The messages of calls that must fail, one rank of which does something else."""
    rank = process_index()
    own = Path(folder) / f"of rank {rank}"
    save_one = lambda path, tree: spmd.save_safetensors(tree, path)  # noqa: E731
    shared = Path(folder) / "shared"
    found = {
        "path": error_of(spmd.load_safetensors, f"{shared}{'/model.safetensors' if rank else ''}", P(), mesh),
        "specs": error_of(spmd.load_safetensors, shared, {"scale": P(), "flags": P("x") if rank else P()}, mesh),
        "name": error_of(spmd.load_safetensors, shared, {"layers.0.v": P()}, mesh),
    }
    previous = Path.cwd()
    os.chdir(own)  # one relative path, other files
    found["missing"] = error_of(spmd.load_safetensors, "missing", P(), mesh)
    found["damaged"] = error_of(spmd.load_safetensors, "damaged.safetensors", P(), mesh)
    found["other"] = error_of(spmd.load_safetensors, "other.safetensors", P(), mesh)
    os.chdir(previous)
    found["leaf"] = error_of(save_one, shared, {"w": 3 if rank else torch.ones(2)})
    found["value"] = error_of(save_one, shared, {"w": torch.ones(2) * rank})
    found["disk"] = error_of(save_on_a_full_disk, folder, mesh)
    return found


def save_on_a_full_disk(folder: str, mesh: spmd.Mesh) -> None:
    append, count = safetensors_saving._File._append, 0

    def fails(file: Any, tensor: torch.Tensor) -> OSError | None:
        nonlocal count
        count += 1
        return append(file, tensor) if count < 3 else OSError("no space left on device")

    safetensors_saving._File._append = fails  # type: ignore[method-assign]
    try:
        save(f"{folder}/full", 100, mesh)
    finally:
        safetensors_saving._File._append = append  # type: ignore[method-assign]
