"""The process groups of torch.distributed for mesh axes."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import attrs
import torch
import torch.distributed as dist

from spmd.collectives.transport.group import Group, groups
from spmd.core.mesh import Coordinate, Mesh
from spmd.job.collective_scope import CollectiveScope
from spmd.job.process import timeout_of

Key: TypeAlias = tuple[tuple[int, ...], str, str]
"""The processes of a group in ascending order, as torch numbers them inside of it, its purpose, and its backend."""

T = TypeVar("T")

# Process groups are global to the process, so this cache is too. A job that is stopped and started again, as in tests,
# has another world group, and the entry of the old one is dropped with it.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Key, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


@attrs.frozen
class Member:
    """This rank's place in a group.

    Args:
        group: the group.
        processes: for each index along the axes, the number of that rank's process in the job.
        index: this rank's index along the group's axes.
        places: for each index along the axes, that rank's number inside torch's group, which numbers ranks in
            ascending order.
        name: the name of torch's group, for functional collectives; empty if nothing is communicated.
        device: the type of the mesh's device.
    """

    group: Group
    processes: tuple[int, ...]
    index: int
    places: tuple[int, ...]
    name: str
    device: str

    @property
    def in_order(self) -> bool:
        """Whether torch numbers the ranks in the order of their index along the axes."""
        return self.places == tuple(range(self.group.size))


def member(mesh: Mesh, axes: tuple[str, ...], coordinate: Coordinate, *, communicates: bool) -> Member:
    """The place of the rank at `coordinate` in the group along `axes`.

    With `communicates`, the first call for some axes is a collective call that makes torch's groups: all ranks must
    make such calls in the same order.
    """
    rank = mesh.rank(coordinate)
    group = next(group for group in groups(mesh, axes) if rank in group.ranks)
    processes = _processes(mesh, group)
    ascending = sorted(processes)
    name = process_group(mesh, axes).group_name if communicates and group.size > 1 else ""
    places = tuple(ascending.index(process) for process in processes)
    return Member(group, processes, group.ranks.index(rank), places, name, mesh.device.type)


def _processes(mesh: Mesh, group: Group) -> tuple[int, ...]:
    every = mesh.ranks
    return tuple(every[rank] for rank in group.ranks)


def process_group(mesh: Mesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """Torch's group along `axes` that has this process's rank, made at its first use by the ranks that are in it.

    It has the backend of the mesh's device only: NCCL's groups have no connections of gloo's. Those are made at once,
    because they are told this process's GPU, and not at the first collective: a rank that is missing shows here.
    """
    rank = mesh.rank(mesh.held_coordinates[0])
    ranks = next(_processes(mesh, group) for group in groups(mesh, axes) if rank in group.ranks)
    if len(ranks) == _world().size():
        return _world()
    return _group(ranks, "", backend(mesh), f"a process group over {', '.join(axes)}", mesh.ranks)


def group_among(processes: Sequence[int], mesh: Mesh) -> dist.ProcessGroup:
    """Torch's group of some processes of the job, this one among them, for a mesh's device; made by all of them."""
    if len(processes) == _world().size():
        return _world()
    return _group(processes, "", backend(mesh), "a process group over two meshes", processes)


def backend(mesh: Mesh) -> str:
    """The backend of torch.distributed for the mesh's device."""
    return str(dist.get_backend_config()).partition(f"{mesh.device.type}:")[2].partition(",")[0]


def group_for(purpose: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """A gloo group of some processes for one purpose, made once; on the CPU, whatever the device of the mesh.

    It is separate because ranks may make different calls. In a shared group, the comparison of one rank could then be
    matched with a collective of the program on another, and gloo ends a process that receives more than it expects.

    Args:
        purpose: the purpose, in words.
        ranks: the numbers of the processes, of which this one is one.
    """
    return _group(ranks, purpose, "gloo", f"a process group for {purpose}", ranks)


def in_rank_order(found: Sequence[T], ranks: Sequence[int]) -> list[T]:
    """What torch has gathered, which is in ascending order of the processes, in the order of `ranks`."""
    by_process = dict(zip(sorted(ranks), found, strict=True))
    return [by_process[rank] for rank in ranks]


def _group(ranks: Sequence[int], purpose: str, kind: str, what: str, mesh: Sequence[int]) -> dist.ProcessGroup:
    """A group of the job that runs now, made at its first use by the processes that are in it, with the job's timeout.

    Not by `dist.new_group(..., use_local_synchronization=True)`: it names a group by the number of those that the
    process has made before, which differs where processes are in different submeshes, and ranks that give one group two
    names never meet.
    """
    world, key = _world(), (tuple(sorted(ranks)), purpose, kind)
    made = _made.setdefault(world, {})
    if key not in made:
        name = f"spmd_{hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()}"
        with CollectiveScope(f"the start of {what}", ranks, mesh):
            made[key] = _make(world, key, name)
    return made[key]


def _make(world: dist.ProcessGroup, key: Key, name: str) -> dist.ProcessGroup:
    """What `dist.new_group` does, with a given name."""
    (ranks, _, kind), c10d = key, dist.distributed_c10d
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(world.rank()),
        list(ranks),
        c10d.Backend(kind),
        c10d._get_default_store(),
        name,  # type: ignore[arg-type]
        timeout=timeout_of(world) or c10d.default_pg_timeout,
        device_id=torch.device("cuda", torch.cuda.current_device()) if kind == "nccl" else None,
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "make_mesh starts torch.distributed"
    return world
