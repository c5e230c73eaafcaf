"""Mesh axes bound to process groups of torch.distributed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

import attrs
import torch.distributed as dist

from spmd.collectives.group import Group, groups
from spmd.core.mesh import Coordinate, Mesh
from spmd.job.collective_scope import CollectiveScope

Partition: TypeAlias = tuple[tuple[int, ...], ...]
"""All ranks, cut into groups: ranks in ascending order, as torch numbers them inside a group."""

# torch's process groups are global to the process, so what was made of them is too. A job that is stopped and started
# again, as in tests, has another world, and what belonged to the old one goes with it.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Partition | str, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


@attrs.frozen
class Member:
    """This rank's place in a group.

    Args:
        group: the group.
        index: this rank's index along the group's axes.
        places: for each index along the axes, that rank's number inside torch's group, which counts ranks upwards.
        name: the name by which functional collectives know torch's group; empty where nothing is communicated.
    """

    group: Group
    index: int
    places: tuple[int, ...]
    name: str

    @property
    def in_order(self) -> bool:
        """Whether torch numbers the ranks as the axes do."""
        return self.places == tuple(range(self.group.size))


def member(mesh: Mesh, axes: tuple[str, ...], coordinate: Coordinate, *, communicates: bool) -> Member:
    """The place of the rank at `coordinate` in the group along `axes`.

    If it communicates, this is a collective call where torch's groups for these axes are not made yet: all ranks ask in
    one order.
    """
    rank = mesh.rank(coordinate)
    group = next(group for group in groups(mesh, axes) if rank in group.ranks)
    ascending = sorted(group.ranks)
    name = process_group(mesh, axes).group_name if communicates and group.size > 1 else ""
    return Member(group, group.ranks.index(rank), tuple(ascending.index(other) for other in group.ranks), name)


def process_group(mesh: Mesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """Torch's group of this process's rank along `axes`, made once for each partition of the ranks."""
    partition = tuple(sorted(tuple(sorted(group.ranks)) for group in groups(mesh, axes)))
    if len(partition) == 1:
        return _world()
    lists = [list(ranks) for ranks in partition]
    what = f"process groups over {', '.join(axes)}"
    return _once(partition, what, lambda limit: dist.new_subgroups_by_enumeration(lists, timeout=limit)[0])


def group_for(purpose: str) -> dist.ProcessGroup:
    """A group of all ranks for one purpose, made once; on the CPU, whatever the mesh lies on.

    Where ranks make different calls, what one of them says must not meet what others compute: gloo ends a process that
    receives more than it expects.
    """
    what = f"a process group for {purpose}"
    return _once(purpose, what, lambda limit: dist.new_group(backend="gloo", timeout=limit))


def _once(key: Partition | str, what: str, make: Callable[[timedelta | None], dist.ProcessGroup]) -> dist.ProcessGroup:
    """A group of the job that runs now, made when it is first asked for, with the job's timeout."""
    world = _world()
    made = _made.setdefault(world, {})
    if key not in made:
        with CollectiveScope(f"the start of {what}", range(world.size())):
            made[key] = make(_timeout_of(world))
    return made[key]


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "make_mesh starts torch.distributed"
    return world


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group waits for a rank, as its first backend has it; torch gives new groups its default instead."""
    return getattr(group._get_backend(group._device_types[0]).options, "_timeout", None)
