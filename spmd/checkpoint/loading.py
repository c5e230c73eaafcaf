"""Loading a checkpoint onto any mesh."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import attrs
import optree
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import ReadItem

from spmd.api.values.checkpointable import check_final
from spmd.api.values.dtensor import DTensor, wrap
from spmd.checkpoint.contents import Contents, check_tiling
from spmd.checkpoint.folder import METADATA, places
from spmd.checkpoint.leaves import name_of_process, named_leaves
from spmd.checkpoint.payloads import read_value
from spmd.checkpoint.position import Position, parse
from spmd.checkpoint.processes import Processes, processes_of
from spmd.checkpoint.reader import Reader
from spmd.checkpoint.saving import ignore_notice, wait_for_last
from spmd.core.mesh import Mesh, current_mesh
from spmd.core.pytree import is_spec, make_spec, tree_leaves
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.core.value_types import VALUES
from spmd.errors import CheckpointError, DamagedError, ShardingError
from spmd.job.tracebacks import hides_internals

_REPLACED = 100
"""How often a load starts again because another job has removed what it reads."""


_Tree = TypeVar("_Tree")


@overload
def load(
    path: str | os.PathLike[str],
    like: DTensor | DTensorSpec | P,
    *,
    mesh: Mesh | None = None,
    name: str | None = None,
) -> DTensor: ...


@overload
def load(  # type: ignore[overload-overlap]  # where the leaves are specs, those of the result are not
    path: str | os.PathLike[str],
    like: Mapping[str, DTensor | DTensorSpec | P],
    *,
    mesh: Mesh | None = None,
    name: str | None = None,
) -> dict[str, DTensor]: ...


@overload
def load(path: str | os.PathLike[str], like: _Tree, *, mesh: Mesh | None = None, name: str | None = None) -> _Tree: ...


@hides_internals
def load(path: str | os.PathLike[str], like: Any, *, mesh: Mesh | None = None, name: str | None = None) -> Any:
    """Load a checkpoint with the shardings of `like`; it may have been saved with other specs, mesh and runtime.

    Of several saves in the folder it is the newest one. If that is damaged, a warning says so, and the newest one that
    is not is loaded. Another job may save into the folder meanwhile.

    The checkpoint need not be trusted: no code in it is run, and all that is read is checked. On a distributed mesh
    this is a collective call, and each rank reads only the parts that it needs.

    Args:
        path: the folder that was given to `save`, one of those that `saved` lists, or one that
            torch.distributed.checkpoint wrote.
        like: a pytree with a leaf for each value to load. For a DTensor or a `DTensorSpec`, the result is a DTensor of
            the same shape, dtype and spec. For a `P`, or a tuple of placements, it is a DTensor with that spec, and
            shape and dtype are those in the checkpoint. For a plain tensor or a `TensorMeta`, it is a plain tensor,
            which every rank reads whole. For a number, text or `Position`, it is the saved value. Other names in the
            checkpoint are ignored.
        mesh: the mesh of `P`s and tuples of placements; by default that of `use_mesh`.
        name: load the save of this name.

    Returns:
        A pytree of new values; those in `like` do not change. Its type is that of `like`: a tuple or a dataclass
        keeps the types of its parts. For one spec it is a DTensor, for a dict of specs a dict of DTensors.

    Raises:
        CheckpointError: no checkpoint, only incomplete or damaged ones, or one that does not match `like`; the message
            lists all missing names, other shapes and dtypes, and specs that do not fit or are partial.
        DivergenceError: ranks have different paths or `like`s, or find different checkpoints.
        SpmdError: a rank failed, or never makes the call.
        MeshError: a `P` without a mesh, or both virtual and distributed meshes.

    >>> import spmd, tempfile
    >>> mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     spmd.checkpoint.save({"params": {"w": torch.ones(3, 2), "b": torch.ones(2)}, "step": 7}, folder)
    ...     load(folder, {"params": {"w": spmd.P("data")}, "step": 0}, mesh=mesh)
    {'params': {'w': DTensor(f32[3,2] P('data') on Mesh(data=2), shards [2,2] [1,2])}, 'step': 7}
    """
    folder = Path(path)
    leaves = tree_leaves(like, is_leaf=is_spec)
    mesh = current_mesh(mesh) if any(is_spec(leaf) for leaf in leaves) else None
    meshes = [leaf.mesh for leaf in leaves if isinstance(leaf, (DTensor, DTensorSpec))]
    processes = processes_of("checkpoint.load", meshes if mesh is None else [*meshes, mesh])
    processes.together(wait_for_last)
    damaged: dict[str, DamagedError] = {}
    for _ in range(_REPLACED):
        found = processes.first(processes.together(lambda: _found(folder, name)))
        place = next((place for place in found if place not in damaged), None)
        if place is None:
            raise damaged[found[0]]
        try:
            loaded = _load(folder, folder / place, like, mesh, processes)
        except DamagedError as error:
            # if it is gone, it was removed for newer ones
            if processes.first(place in places(folder, name)):
                damaged[place] = error
            continue
        for damage in damaged.values():
            warnings.warn(f"{damage} Loaded {folder / place} instead.", stacklevel=2)
        return loaded
    raise CheckpointError(
        f"Each of {_REPLACED} saves in {folder} was removed while it was read. Save with a larger keep=, or less often."
    )


def _found(folder: Path, name: str | None) -> list[str]:
    found = places(folder, name)
    if not found:
        which = "" if name is None else f" named {name!r}"
        raise CheckpointError(
            f"There is no checkpoint{which} in {folder}: it has no complete save and no file {METADATA}. Check the "
            "path, or wait() for the save."
        )
    return found


def _load(folder: Path, save: Path, like: Any, mesh: Mesh | None, processes: Processes) -> Any:
    """Load one save of a checkpoint's folder."""

    def prepare() -> tuple[Reader, list[_Target], optree.PyTreeSpec]:
        names, leaves, structure = named_leaves(like, is_leaf=is_spec)
        reader = Reader(save)
        wanted = dict(zip(names, leaves, strict=True))
        return reader, _targets(reader.contents, wanted, mesh, folder, processes), structure

    reader, targets, structure = processes.together(prepare)
    claims = {f"leaf {target.name}": str(target) for target in targets}
    processes.agree(lambda: {"the path": str(folder), "the save": reader.manifest.digest, **claims})
    ignore_notice()
    values = {target.stored: target.empty() for target in targets}
    with processes.errors_of(f"Loading from {save}"):
        dcp.load(
            values,
            storage_reader=reader,
            planner=_LoadPlanner(),
            process_group=processes.group,
            no_dist=processes.group is None,
        )
    if any(target.is_position for target in targets):
        values.update(processes.together(lambda: _positions(values, targets, reader.contents, processes)))
    return structure.unflatten(values[target.stored] for target in targets)


def _positions(
    values: dict[str, Any], targets: list[_Target], contents: Contents, processes: Processes
) -> dict[str, Position]:
    """The positions in values that were read; of another number of processes only one that all of them shared."""
    found = {}
    for target in targets:
        if not target.is_position:
            continue
        try:
            found[target.stored], count = parse(values[target.stored])
        except CheckpointError as error:
            raise CheckpointError(f"Leaf {target.name} of the checkpoint cannot be loaded: {error}") from error
        own = sum(name.startswith(name_of_process(target.name, "")) for name in contents.values)
        if own and count != processes.count:
            raise CheckpointError(
                f"Leaf {target.name} was saved by {count} processes, of which {own} had other data or generators than "
                f"rank 0, and cannot be loaded by {processes.count}. Load it with as many, or leave it out of like."
            )
    return found


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's load planner, restricted to plain values where DCP would unpickle any object."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = read_value(value.read())
        except CheckpointError as error:
            raise CheckpointError(f"Leaf {name} of the checkpoint is not a number or text: {error}") from error


@attrs.frozen
class _Target:
    """What one name of the checkpoint is loaded as.

    Args:
        name: the name in the checkpoint.
        meta: the shape and dtype of a tensor; None for a number or text.
        spec: the spec of a DTensor; None for others.
        device: the device of a plain tensor.
        position: the name under which this process finds its position; None for others.
    """

    name: str
    meta: TensorMeta | None = None
    spec: DTensorSpec | None = None
    device: torch.device = torch.device("cpu")
    position: str | None = None

    @property
    def is_position(self) -> bool:
        """Whether it is a `Position`."""
        return self.position is not None

    @property
    def stored(self) -> str:
        """The name in the checkpoint of what this process reads."""
        return self.name if self.position is None else self.position

    def empty(self) -> Any:
        """A value with uninitialized memory, into which DCP reads."""
        if self.meta is None:
            return 0
        if self.spec is None:
            return torch.empty(self.meta.shape, dtype=self.meta.dtype, device=self.device)
        mesh = self.spec.mesh
        shapes = [self.spec.local_shape(coordinate) for coordinate in mesh.held_coordinates]
        return wrap(self.spec, tuple(torch.empty(shape, dtype=self.meta.dtype, device=mesh.device) for shape in shapes))

    def __str__(self) -> str:
        return _text(self.meta) if self.spec is None else f"{self.spec} on {self.spec.mesh}"


def _targets(
    contents: Contents, wanted: dict[str, Any], mesh: Mesh | None, folder: Path, processes: Processes
) -> list[_Target]:
    """The targets of all wanted names; a CheckpointError lists every name that is missing or different."""
    targets, wrong = [], []
    for name, leaf in wanted.items():
        try:
            targets.append(_target(name, leaf, contents, mesh, processes))
        except (CheckpointError, ShardingError) as error:
            wrong.append(str(error))
    if not wrong:
        return targets
    besides = sorted(contents.names - wanted.keys())
    rest = f"\nIt has besides: {_listed(besides)}." if besides else ""
    raise CheckpointError(
        "\n  ".join([f"The checkpoint in {folder} is not like what is wanted:", *wrong]) + f"{rest}\n{_AS_SAVED}"
    )


_AS_SAVED = "Give the names, shapes and dtypes that were saved, and rename or convert what is loaded."


def _target(name: str, leaf: Any, contents: Contents, mesh: Mesh | None, processes: Processes) -> _Target:
    """The target of one name; an error if the checkpoint has something else under it."""
    if name not in contents.names:
        raise CheckpointError(f"{name}: missing")
    saved = contents.tensors.get(name)
    meta = None if saved is None else saved.meta
    if isinstance(leaf, Position):
        own = name_of_process(name, processes.index)
        target = _Target(name, position=own if own in contents.values else name)
    else:
        target = _wanted(name, leaf, meta, mesh)
    if meta != target.meta:
        raise CheckpointError(f"{name}: {_text(meta)} in the checkpoint, {_text(target.meta)} in like")
    if saved is not None:
        check_tiling(name, saved)
    return target


def _wanted(name: str, leaf: Any, saved: TensorMeta | None, mesh: Mesh | None) -> _Target:
    if isinstance(leaf, VALUES):
        return _Target(name)
    if isinstance(leaf, TensorMeta):
        return _Target(name, leaf)
    if isinstance(leaf, (DTensor, DTensorSpec)) or is_spec(leaf):
        spec = _wanted_spec(name, leaf, saved, mesh)
        check_final(spec, name)
        return _Target(name, spec.meta, spec)
    if isinstance(leaf, torch.Tensor):
        return _Target(name, TensorMeta.of(leaf), device=torch.device("cpu") if leaf.is_meta else leaf.device)
    raise CheckpointError(
        f"{name}: like must have a tensor, a TensorMeta, a DTensorSpec, a P, a number or text (got "
        f"{type(leaf).__name__})"
    )


def _wanted_spec(name: str, leaf: Any, saved: TensorMeta | None, mesh: Mesh | None) -> DTensorSpec:
    if isinstance(leaf, DTensor):
        return leaf.spec
    if isinstance(leaf, DTensorSpec):
        return leaf
    if saved is None or mesh is None:
        raise CheckpointError(f"{name}: {_text(None)} in the checkpoint, the spec {leaf!r} in like")
    return make_spec(mesh, leaf, saved, where=name)


def _text(meta: TensorMeta | None) -> str:
    return "a number or text" if meta is None else str(meta)


def _listed(names: list[str], limit: int = 20) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
