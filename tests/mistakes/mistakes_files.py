"""Checkpoints and files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from mistake import MESH, Mistake, collector

import spmd
from spmd import P

MISTAKES: list[Mistake] = []
mistake = collector(MISTAKES)


@mistake("A folder without a checkpoint", "Check the path")
def no_checkpoint() -> None:
    spmd.checkpoint.load("no-such-checkpoint", {"w": torch.ones(4)})


@mistake("A name that was not saved", "Give the names")
def missing_name() -> None:
    folder = tempfile.mkdtemp()
    spmd.checkpoint.save({"w": torch.ones(8, 4)}, folder)
    spmd.checkpoint.load(folder, {"weight": torch.ones(8, 4)})


@mistake("A tensor of another shape", "that were saved, and rename or convert")
def other_shape() -> None:
    folder = tempfile.mkdtemp()
    spmd.checkpoint.save({"w": torch.ones(8, 4)}, folder)
    spmd.checkpoint.load(folder, {"w": torch.ones(4, 4)})


@mistake("A tensor of another dtype", "convert what is loaded")
def other_dtype() -> None:
    folder = tempfile.mkdtemp()
    spmd.checkpoint.save({"w": torch.ones(8, 4)}, folder)
    spmd.checkpoint.load(folder, {"w": torch.ones(8, 4, dtype=torch.bfloat16)})


@mistake("Specs without a mesh", "with spmd.use_mesh(mesh)")
def no_mesh_for_specs() -> None:
    folder = tempfile.mkdtemp()
    spmd.checkpoint.save({"w": torch.ones(8, 4)}, folder)
    spmd.checkpoint.load(folder, {"w": P("data")})


@mistake("A module in place of its state", "Pass its state")
def saves_a_module() -> None:
    folder = tempfile.mkdtemp()
    spmd.checkpoint.save({"model": torch.nn.Linear(2, 2)}, folder)


@mistake("A function in the state", "Leave it out")
def saves_a_function() -> None:
    folder = tempfile.mkdtemp()
    spmd.checkpoint.save({"w": torch.ones(4), "schedule": lambda step: 0.1}, folder)


@mistake("A file in place of a folder", "choose another path")
def path_is_a_file() -> None:
    folder = tempfile.mkdtemp()
    file = Path(folder) / "model.pt"
    file.write_bytes(b"")
    spmd.checkpoint.save({"w": torch.ones(4)}, file)


@mistake("A safetensors file that is not there", "Give a file *.safetensors")
def no_safetensors() -> None:
    spmd.load_safetensors("no-such-model.safetensors", P(), MESH)


@mistake("A checkpoint of which a file was cut", "Load an older checkpoint")
def damaged() -> None:
    folder = tempfile.mkdtemp()
    spmd.checkpoint.save({"w": torch.ones(8, 4)}, folder)
    for file in Path(folder).rglob("*.distcp"):
        file.write_bytes(file.read_bytes()[:10])
    spmd.checkpoint.load(folder, {"w": torch.ones(8, 4)})
