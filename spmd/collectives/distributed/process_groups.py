"""The process groups of torch.distributed for mesh axes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeAlias

import attrs
import torch.distributed as dist

from spmd.collectives.group import Group, groups
from spmd.core.mesh import Coordinate, Mesh
from spmd.job.collective_scope import CollectiveScope

Key: TypeAlias = tuple[tuple[int, ...] | str, str]
"""The ranks of a group in ascending order, as torch numbers them inside of it, or its purpose; and its backend."""

# Process groups are global to the process, so this cache is too. A job that is stopped and started again, as in tests,
# has another world group, and the entry of the old one is dropped with it.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Key, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


@attrs.frozen
class Member:
    """This rank's place in a group.

    Args:
        group: the group.
        index: this rank's index along the group's axes.
        places: for each index along the axes, that rank's number inside torch's group, which numbers ranks in
            ascending order.
        name: the name of torch's group, for functional collectives; empty if nothing is communicated.
    """

    group: Group
    index: int
    places: tuple[int, ...]
    name: str

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
    ascending = sorted(group.ranks)
    name = process_group(mesh, axes).group_name if communicates and group.size > 1 else ""
    return Member(group, group.ranks.index(rank), tuple(ascending.index(other) for other in group.ranks), name)


def process_group(mesh: Mesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """Torch's group along `axes` that has this process's rank, made at its first use by the ranks that are in it.

    It has the backend of the mesh's device only: NCCL's groups have no connections of gloo's.
    """
    rank, world = dist.get_rank(), _world()
    ranks = next(tuple(sorted(group.ranks)) for group in groups(mesh, axes) if rank in group.ranks)
    if len(ranks) == world.size():
        return world
    kind = backend(mesh)

    def make(limit: timedelta | None) -> dist.ProcessGroup:
        made = dist.new_group(list(ranks), backend=kind, timeout=limit, use_local_synchronization=True)
        assert made is not None
        return made

    return _once((ranks, kind), f"a process group over {', '.join(axes)}", ranks, make)


def backend(mesh: Mesh) -> str:
    """The backend of torch.distributed for the mesh's device."""
    return str(dist.get_backend_config()).partition(f"{mesh.device.type}:")[2].partition(",")[0]


def group_for(purpose: str) -> dist.ProcessGroup:
    """A gloo group of all ranks for one purpose, made once; on the CPU, whatever the device of the mesh.

    It is separate because ranks may make different calls. In a shared group, the comparison of one rank could then be
    matched with a collective of the program on another, and gloo ends a process that receives more than it expects.
    """
    ranks = range(_world().size())
    what = f"a process group for {purpose}"
    return _once((purpose, "gloo"), what, ranks, lambda limit: dist.new_group(backend="gloo", timeout=limit))


def _once(
    key: Key, what: str, ranks: Sequence[int], make: Callable[[timedelta | None], dist.ProcessGroup]
) -> dist.ProcessGroup:
    """A group of the job that runs now, made at its first use, with the job's timeout."""
    world = _world()
    made = _made.setdefault(world, {})
    if key not in made:
        with CollectiveScope(f"the start of {what}", ranks):
            made[key] = make(_timeout_of(world))
    return made[key]


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "make_mesh starts torch.distributed"
    return world


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group's first backend, to pass to new groups, for which torch would use its default."""
    return getattr(group._get_backend(group._device_types[0]).options, "_timeout", None)
