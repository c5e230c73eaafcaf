"""Saving a checkpoint, synchronously or in the background."""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from spmd.api.values.checkpointable import check_final, offsets, owned
from spmd.api.values.dtensor import DTensor, wrap
from spmd.api.values.wrapper import require_shards
from spmd.checkpoint.folder import check_options, new_save
from spmd.checkpoint.leaves import describe_leaf, name_of_process, named_leaves
from spmd.checkpoint.position import Position
from spmd.checkpoint.processes import Processes, processes_of
from spmd.checkpoint.staging import Staging
from spmd.checkpoint.writer import CheckpointWriter
from spmd.core.pytree import leaf_remedy, tree_leaves
from spmd.core.value_types import VALUES
from spmd.errors import CheckpointError
from spmd.job.background import wait_before_exit
from spmd.job.tracebacks import hides_internals

Progress: TypeAlias = Callable[[int, int], object]
"""A callback `on_progress(done, total)`: the bytes that this process has written, and all that it writes."""


@hides_internals
def save(
    tree: object,
    path: str | os.PathLike[str],
    *,
    keep: int | None = 1,
    name: str | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Write a pytree as a checkpoint, and return when it is on disk.

    On a distributed mesh this is a collective call of its ranks, or of the whole job if the tree has no DTensor, and
    each rank writes its part; the folder must be on a file system that all ranks share. Earlier
    saves in the folder are removed when the new one is complete: if the save is killed, the folder holds a complete
    checkpoint, the earlier or the new one.

    Args:
        tree: a pytree of DTensors, plain tensors, numbers or text, and a `Position`. Plain leaves, which all ranks
            hold, are written by the first rank.
        path: the checkpoint's folder; it is created if it does not exist.
        keep: how many saves without a name stay in the folder, with the new one; None for all. Orbax's `max_to_keep`. A
            load of the whole folder that reads one which is removed goes on with a newer one; a load of the removed
            one's own folder fails.
        name: a name for the save, such as "best". It stays until another save has this name, whatever `keep` is.
        on_progress: called as `on_progress(done, total)` with bytes of this process; `done == total` once the
            checkpoint is complete.

    Raises:
        ShardingError: a partial leaf, or a DTensor that was donated.
        CheckpointError: a leaf that cannot be stored, two leaves with one name, an impossible `keep` or `name`, or a
            failure to write, on any rank.
        DivergenceError: ranks save different trees, to different paths, or with other options.
        SpmdError: a rank failed, or never makes the call.
        MeshError: leaves on both virtual and distributed meshes.

    >>> import spmd, tempfile
    >>> mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    >>> w = spmd.distribute(torch.arange(3.0), spmd.P("data"), mesh)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"w": w, "step": 7}, folder)
    ...     spmd.checkpoint.load(folder, {"w": spmd.P(), "step": 0}, mesh=mesh)
    {'w': DTensor(f32[3] P() on Mesh(data=2), shards 2x[3]), 'step': 7}
    """
    _prepare(tree, path, keep, name).write(on_progress)


@hides_internals
def save_async(
    tree: object,
    path: str | os.PathLike[str],
    *,
    keep: int | None = 1,
    name: str | None = None,
    on_progress: Progress | None = None,
) -> Saving:
    """Copy a pytree to CPU memory, and write it in a background thread.

    When this returns, the values may be donated; copies from a GPU go on, and what its stream is given later waits for
    them. One save runs at a time: the next save or load first waits for it, and raises its error if `Saving.wait` has
    not. A program that ends waits for it too, and prints an error that nobody has seen; its exit status is 120 then, on
    all ranks.

    Args and errors are those of `save`; failures to write are raised by `Saving.wait`. `on_progress` is called in the
    background thread.

    Returns:
        The save that runs.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = save_async({"step": 7}, folder)
    ...     saving.wait()
    """
    global _last
    staged = _prepare(tree, path, keep, name).copied()
    _last = Saving(lambda: staged.write(on_progress))
    wait_before_exit(wait_for_last)
    return _last


class Saving:
    """A save in a background thread, which starts at once."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="spmd-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when the checkpoint is on disk. If the save failed, the first call raises its error."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
        del self._write  # frees the copies


_last: Saving | None = None
"""The last background save."""


def wait_for_last() -> None:
    """Wait for the last background save; raise its error if `Saving.wait` has not."""
    if _last is not None:
        _last.wait()


@attrs.frozen
class _Save:
    """One save, before anything is written.

    Args:
        leaves: the leaves of which this process writes a part, by name.
        folder: the checkpoint's folder.
        save: the name of the save's folder.
        keep: the number of unnamed saves that stay in the checkpoint's folder; None for all.
        processes: the processes that take part.
        staging: the copies to wait for before leaves are read.
    """

    leaves: dict[str, Any]
    folder: Path
    save: str
    keep: int | None
    processes: Processes
    staging: Staging = attrs.field(factory=Staging)

    def copied(self) -> _Save:
        """The same save with copies of the leaves, in CPU memory."""
        staging = Staging()
        leaves = {name: _copy(name, leaf, staging) for name, leaf in self.leaves.items()}
        staging.finish()
        return attrs.evolve(self, leaves=leaves, staging=staging)

    def write(self, on_progress: Progress | None) -> None:
        """Write it; on failure, remove what was written."""
        ignore_notice()
        writer, planner = CheckpointWriter(self.folder, self.save, self.keep), _SavePlanner(on_progress, self.staging)
        try:
            with self.processes.errors_of(f"Saving to {self.folder}"):
                dcp.save(
                    self.leaves,
                    storage_writer=writer,
                    planner=planner,
                    process_group=self.processes.group,
                    no_dist=self.processes.group is None,
                )
        except BaseException:
            if self.processes.is_first:
                writer.discard()
            raise
        planner.finished()


class _SavePlanner(dcp.DefaultSavePlanner):
    """DCP's save planner with progress: when DCP asks for an item, it has written the items before."""

    def __init__(self, on_progress: Progress | None, staging: Staging) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._on_progress = on_progress
        self._staging = staging
        self._done = self._next = self._total = 0

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._staging.wait()
        self._total = sum(map(_size, new_plan.items))
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._done, self._next = self._done + self._next, _size(write_item)
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)
        return super().resolve_data(write_item)

    def finished(self) -> None:
        """Report that the checkpoint is complete."""
        if self._on_progress is not None:
            self._on_progress(self._total, self._total)


def _size(item: WriteItem) -> int:
    """The bytes of a tensor's chunk; plain values count as 0."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _prepare(tree: Any, path: str | os.PathLike[str], keep: int | None, name: str | None) -> _Save:
    processes = processes_of("checkpoint.save", (leaf.mesh for leaf in tree_leaves(tree) if isinstance(leaf, DTensor)))
    processes.together(wait_for_last)
    folder = Path(path)

    def prepare() -> tuple[dict[str, Any], str]:
        check_options(keep, name)
        return _checked_leaves(tree, folder), new_save(folder, name)

    leaves, save = processes.together(prepare)
    claims = {"the path": str(folder), "keep": repr(keep), "name": repr(name)}
    processes.agree(lambda: {**claims, **{f"leaf {name}": describe_leaf(leaf) for name, leaf in leaves.items()}})
    return _Save(_written(leaves, processes), folder, processes.first(save), keep, processes)


def _written(leaves: dict[str, Any], processes: Processes) -> dict[str, Any]:
    """The leaves of which this process writes a part; positions as text, of other processes only if they differ."""
    positions = {name: leaf.to_text(processes.count) for name, leaf in leaves.items() if isinstance(leaf, Position)}
    firsts = processes.first(positions) if positions else {}
    if processes.is_first:
        return {**leaves, **positions}
    own = {name_of_process(name, processes.index): text for name, text in positions.items() if text != firsts[name]}
    return {**{name: leaf for name, leaf in leaves.items() if isinstance(leaf, DTensor)}, **own}


def _checked_leaves(tree: Any, folder: Path) -> dict[str, Any]:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file. A checkpoint is a folder: choose another path.")
    names, leaves, _ = named_leaves(tree)
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, DTensor):
            check_final(leaf.spec, name)
            require_shards(leaf)
        elif isinstance(leaf, torch.Tensor):
            if leaf.is_meta or leaf.layout is not torch.strided:
                kind = "a meta tensor" if leaf.is_meta else f"layout {leaf.layout}"
                raise CheckpointError(f"Leaf {name} must be a dense tensor with data (got {kind}).")
        elif not isinstance(leaf, (*VALUES, Position)):
            is_module = isinstance(leaf, torch.nn.Module)
            remedy = leaf_remedy(leaf) if is_module else "Leave it out, and make it again after loading."
            raise CheckpointError(
                f"Leaf {name} must be a tensor, a number or text (got {type(leaf).__name__}). {remedy}"
            )
    return dict(zip(names, (leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves), strict=True))


def _copy(name: str, leaf: Any, staging: Staging) -> Any:
    """A copy of a leaf in CPU memory; of a DTensor, only the shards that this process writes are copied."""
    if not isinstance(leaf, DTensor):
        return staging.copy(leaf) if isinstance(leaf, torch.Tensor) else leaf
    spec, coordinates = leaf.spec, leaf.mesh.held_coordinates
    copies = {
        offsets(spec, coordinates[position]): staging.copy(leaf.shards[position])
        for position in owned(spec, coordinates, name)
    }
    nothing = torch.empty(0)
    return wrap(spec, tuple(copies.get(offsets(spec, coordinate), nothing) for coordinate in coordinates))


def ignore_notice() -> None:
    """Ignore torch's warning, at a save or load by one process, that torch.distributed is not initialized."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
