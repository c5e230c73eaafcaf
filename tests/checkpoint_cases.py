"""What the ranks of the tests of distributed checkpoints run: functions that workers import."""

from __future__ import annotations

import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_writers
import torch
import torch.distributed as dist
from distributed_cases import CONFIG, error_of, on, values

import layouts
import spmd
import training
from spmd import DTensorSpec, P
from spmd.checkpoint import Position, Saving, load, save, save_async, saved
from spmd.checkpoint.writer import CheckpointWriter
from spmd.job.process import process_count, process_index


def write(folder: str, specs: list[DTensorSpec], values: list[torch.Tensor], runtime: str) -> None:
    """Save a list of tensors that lie by specs, on a mesh of the given runtime."""
    mesh = spmd.make_mesh(specs[0].mesh.axes, runtime=runtime)
    save(spmd.distribute(values, [spec.pspec for spec in specs], mesh), folder)


def read(folder: str, specs: list[DTensorSpec], runtime: str) -> list[tuple[torch.Tensor, ...]]:
    """The shards, in this process, of a list of tensors that is loaded by specs on a mesh of the given runtime."""
    mesh = spmd.make_mesh(specs[0].mesh.axes, runtime=runtime)
    return [tensor.shards for tensor in load(folder, [on(mesh, spec) for spec in specs])]


def plain_leaves(folder: str) -> list[str]:
    """The files of a tree that every rank has whole: rank 0 writes it."""
    tree = {"w": torch.ones(3), "step": 5, "name": "run"}
    save(tree, folder)
    loaded = load(folder, tree)
    assert torch.ones(3).equal(loaded["w"]) and (5, "run") == (loaded["step"], loaded["name"])
    sizes = {path.name: path.stat().st_size for path in Path(folder).glob("data-*/*.distcp")}
    return sorted(name for name, size in sizes.items() if size)


def compute_while_saving(folder: str, mesh_axes: dict[str, int]) -> None:
    """Save in the background while the collectives of training go on."""
    mesh = spmd.make_mesh(mesh_axes, runtime="distributed")
    spec = P(mesh.names)
    step = spmd.jit(lambda x: x - x.mean(), (spec,), spec, mesh=mesh, donate_argnums=0)
    x = spmd.distribute(values(64, 100), spec, mesh)
    for number in range(5):
        kept = x.full_tensor()
        saving = save_async({"x": x, "number": number}, folder)
        for _ in range(5):
            x = step(x)
        saving.wait()
        loaded = load(folder, {"x": P(None, mesh.names), "number": 0}, mesh=mesh)
        assert number == loaded["number"] and kept.equal(loaded["x"].full_tensor())


def stop_and_resume(folder: str, axes: dict[str, int]) -> tuple[list[float], list[float]]:
    """Losses of two steps of training after two that were saved; those of the same steps again, from the checkpoint."""
    setup = training.Training(CONFIG, layouts.STRATEGIES["fsdp_tp"], spmd.make_mesh(axes, runtime="distributed"))
    step = setup.step()
    state, _ = train(step, setup.init(), range(2))
    save(state, folder)
    return train(step, state, range(2, 4))[1], resume(folder, setup, step)


def resume(folder: str, setup: training.Training, step: Any = None) -> list[float]:
    """Losses of the two steps after a checkpoint that was saved after two."""
    return train(step or setup.step(), load(folder, setup.state_spec, mesh=setup.mesh), range(2, 4))[1]


def train(step: Any, state: Any, numbers: range) -> tuple[Any, list[float]]:
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        batch = tuple(torch.randint(CONFIG.vocab, (8, CONFIG.context), generator=generator) for _ in range(2))
        state, loss = step(state, batch)
        losses.append(loss.item())
    return state, losses


def errors(folder: str) -> dict[str, str]:
    """The messages of what is refused on all ranks, and what can be loaded afterwards."""
    rank = process_index()
    mesh = spmd.make_mesh({"x": 4}, runtime="distributed")
    virtual = spmd.make_mesh({"x": 4}, runtime="virtual")
    w = spmd.distribute(values(6), P("x"), mesh)
    save({"w": w, "step": 1}, folder)
    here = f"{folder}-{rank}" if rank == 2 else folder
    found = {
        "shape": error_of(save, {"w": spmd.distribute(values(6), P() if rank == 1 else P("x"), mesh)}, folder),
        "number": error_of(save, {"w": w, "step": rank // 3}, folder),
        "plain": error_of(save, {"w": torch.full((2,), float(rank == 3))}, folder),
        "leaves": error_of(save, {"w": w, **({"extra": 1} if rank == 1 else {})}, folder),
        "path": error_of(save, {"w": w}, here),
        "one leaf": error_of(save, {"w": w, "step": print if rank == 3 else 1}, folder),
        "runtimes": error_of(save, {"w": w, "v": spmd.distribute(values(6), P("x"), virtual)}, folder),
        "partial": error_of(save, {"w": spmd.distribute(values(6), P(partial={"x": "sum"}), mesh)}, folder),
        "missing": error_of(load, folder, {"v": w}),
        "no checkpoint": error_of(load, here, {"w": w}),
        "like": error_of(load, folder, {"w": P() if rank == 1 else P("x")}, mesh=mesh),
        "disk": error_of(on_full_disk, save, {"w": w, "step": 2}, folder),
        "background": error_of(on_full_disk, lambda: (save_async({"w": w, "step": 2}, folder), save({}, folder))),
    }
    assert 1 == load(folder, {"step": 0})["step"]
    assert 1 == len(list(Path(folder).glob("data-*")))
    return found


def positions(folder: str) -> dict[str, Any]:
    """What each rank finds of positions that all ranks share, and of such as differ between them."""
    rank = process_index()
    mesh = spmd.make_mesh({"x": process_count()}, runtime="distributed")
    x = spmd.distribute(values(6), P("x"), mesh)
    torch.manual_seed(0)
    random.seed(0)
    save({"x": x, "position": Position.now(7, {"batch": 3})}, f"{folder}-same")
    own = torch.Generator().manual_seed(rank)
    random.seed(rank)
    save({"x": x, "position": Position.now(8, {"batch": 10 + rank}, generators={"own": own})}, f"{folder}-different")
    expected = torch.rand(2, generator=own), torch.rand(2), random.random()
    loaded = load(f"{folder}-different", {"x": x, "position": Position()})["position"]
    own.manual_seed(9)
    loaded.restore(generators={"own": own})
    found = torch.rand(2, generator=own), torch.rand(2), random.random()
    return {
        "data": (loaded.step, loaded.data),
        "goes on": [
            torch.as_tensor(one).equal(torch.as_tensor(other)) for one, other in zip(expected, found, strict=True)
        ],
        "step": error_of(save, {"position": Position(rank)}, folder),
    }


def load_position(folder: str) -> str:
    """The position that a job of another size loads, or the error."""
    mesh = spmd.make_mesh({"x": process_count()}, runtime="distributed")
    like = {"x": P("x"), "position": Position()}
    try:
        return str(load(folder, like, mesh=mesh)["position"])
    except spmd.CheckpointError as error:
        return str(error)


def load_repeatedly(folder: str, axes: dict[str, int], runtime: str, times: int) -> list[int]:
    """The numbers of the saves that loads find, one after the other, until they have found four saves."""
    mesh = spmd.make_mesh(axes, runtime=runtime)
    found: list[int] = []
    while len(found) < times or len(set(found)) < 4:
        found.append(checkpoint_writers.loaded_number(folder, mesh))
    return found


def damaged_on_one_rank(folder: str) -> tuple[str, list[str], int]:
    """The error of other options on one rank; the warnings and the step of a load when one rank's file is damaged."""
    mesh = spmd.make_mesh({"x": 2}, runtime="distributed")
    trees = [{"x": spmd.distribute(values(6), P("x"), mesh), "step": step} for step in range(3)]
    error = error_of(lambda: save(trees[0], folder, keep=2 + process_index()))
    for tree in trees:
        save(tree, folder, keep=2)
    if process_index() == 1:
        path = saved(folder)[0] / "__1_0.distcp"
        path.write_bytes(path.read_bytes().replace(b"\0\0\x80@", b"\0\0\x81@"))  # 4.0
    dist.barrier()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loaded = load(folder, trees[0])
    return error, [str(warning.message) for warning in warned], loaded["step"]


def errors_in_the_background(folder: str) -> dict[str, str]:
    """The error of what each rank calls after a save in the background that has failed; the next call works."""
    tree = {"step": 0}
    save(tree, folder)
    calls: dict[str, Callable[[Saving], Any]] = {
        "wait": lambda saving: saving.wait(),
        "save": lambda _: save(tree, folder),
        "save_async": lambda _: save_async(tree, folder),
        "load": lambda _: load(folder, tree),
    }
    found = {}
    for name, call in calls.items():
        saving = on_full_disk(lambda: ended(save_async({"step": 1}, folder)), full_on=1)
        found[name] = error_of(call, saving)
        assert tree == load(folder, tree)
    return found


def ended(saving: Saving) -> Saving:
    """A save that has ended, whose error nobody has seen."""
    while not saving.is_done:
        time.sleep(0.01)
    return saving


def on_full_disk(function: Callable[..., Any], *args: Any, full_on: int = 2) -> Any:
    """Call a function while one rank cannot write."""
    write = CheckpointWriter.write_data

    def fail(*_: Any) -> Any:
        raise OSError("no space left on device")

    if process_index() == full_on:
        CheckpointWriter.write_data = fail  # type: ignore[method-assign]
    try:
        return function(*args)
    finally:
        CheckpointWriter.write_data = write  # type: ignore[method-assign]


def own_folder() -> str:
    """The error of a mistake that is easily made: a folder for every rank."""
    with tempfile.TemporaryDirectory() as folder:
        return error_of(save, {"step": 1}, folder)
