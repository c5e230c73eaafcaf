"""Named mesh axes and the map between ranks and coordinates."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from functools import lru_cache
from typing import Any, Literal

import attrs
import torch

from spmd.core.pictures.blocks import Blocks, Dim
from spmd.core.pictures.picture import Picture
from spmd.errors import MeshError
from spmd.job.collective_scope import MOST, name_ranks
from spmd.job.process import choose_device, is_distributed, process_count, process_index, start
from spmd.job.tracebacks import hides_internals

Coordinate = tuple[int, ...]
"""A rank's index along each mesh axis, in mesh order."""


class Runtime(Enum):
    """Where the ranks of a mesh run: all in this process, one in each process, or nowhere (planning only)."""

    VIRTUAL = "virtual"
    DISTRIBUTED = "distributed"
    ABSTRACT = "abstract"


def _as_device(device: torch.device | str) -> torch.device:
    return torch.device(device)


def _as_processes(ranks: Iterable[int] | None, mesh: Any) -> tuple[int, ...] | None:
    """The processes of a mesh; None where the ranks of the mesh have the numbers of theirs, so that such are equal."""
    given = None if ranks is None else tuple(ranks)
    return None if given == tuple(range(len(given or ()))) and len(given) == mesh.size else given


@attrs.frozen(cache_hash=True)
class Mesh:
    """A grid of ranks with named axes; ranks are numbered row-major (the last axis varies fastest).

    Immutable, hashable, and equal to every mesh of the same axes, runtime, device and processes. `make_mesh` makes one,
    and `mesh["data"]` is its part along some axes.

    Args:
        names: the name of each axis.
        sizes: the number of ranks along each axis.
        runtime: where the ranks run.
        device: the device of the shards.
        ranks: on a distributed mesh, the number of each rank's process in the job, in rank order; by default that of
            the rank.

    Raises:
        MeshError: no axis, a repeated or malformed name, a size below 1, or ranks that are not distinct numbers, one
            for each rank of a distributed mesh.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    runtime: Runtime = Runtime.VIRTUAL
    device: torch.device = attrs.field(default=torch.device("cpu"), converter=_as_device)
    _ranks: tuple[int, ...] | None = attrs.field(
        default=None,
        repr=False,
        converter=attrs.Converter(_as_processes, takes_self=True),  # type: ignore[misc]  # too new for mypy's plugin
    )

    def __attrs_post_init__(self) -> None:
        if not self.names:
            raise MeshError("A mesh needs at least one axis (got none). Write make_mesh({'data': 8}).")
        if len(self.names) != len(self.sizes):
            raise MeshError(f"A mesh needs one size an axis (got names {self.names} and sizes {self.sizes}).")
        if len(set(self.names)) != len(self.names):
            raise MeshError(f"Mesh axis names must be unique (got {', '.join(self.names)}).")
        for name, size in zip(self.names, self.sizes, strict=True):
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"Mesh axis names must be identifiers (got {name!r}).")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MeshError(f"Mesh axis {name!r} must have a positive integer size (got {size!r}).")
        if self._ranks is not None:
            _check_processes(self, self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of each rank's process in the job (`process_index()` there), in rank order.

        Only a distributed mesh of some of the job's processes has others than 0, 1, ... Messages name these numbers.
        """
        return tuple(range(self.size)) if self._ranks is None else self._ranks

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def axes(self) -> dict[str, int]:
        """Axis names and sizes, in mesh order."""
        return dict(zip(self.names, self.sizes, strict=True))

    def axis_size(self, axes: str | Sequence[str]) -> int:
        """The number of ranks along one axis, or the product over several; MeshError on an unknown axis.

        >>> make_mesh({"data": 2, "model": 4}, runtime="virtual").axis_size(("data", "model"))
        8
        """
        names = (axes,) if isinstance(axes, str) else axes
        return math.prod(self.sizes[self.axis_position(name)] for name in names)

    def axis_position(self, name: str) -> int:
        """The position of an axis in mesh order; MeshError if the mesh has no such axis."""
        if name not in self.names:
            raise MeshError(f"Unknown mesh axis {name!r}: {self} has axes {', '.join(map(repr, self.names))}.")
        return self.names.index(name)

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of a rank; MeshError unless the rank is in 0..size - 1."""
        if not 0 <= rank < self.size:
            raise MeshError(f"Rank must be in 0..{self.size - 1} of {self} (got {rank}).")
        reversed_coordinate = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            reversed_coordinate.append(index)
        return tuple(reversed(reversed_coordinate))

    def rank(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate, the inverse of `coordinate`; MeshError if the coordinate is outside the mesh."""
        if len(coordinate) != len(self.sizes) or not all(
            0 <= index < size for index, size in zip(coordinate, self.sizes, strict=True)
        ):
            raise MeshError(f"Coordinate must lie in {self} (got {tuple(coordinate)}).")
        rank = 0
        for index, size in zip(coordinate, self.sizes, strict=True):
            rank = rank * size + index
        return rank

    def coordinates(self) -> Iterator[Coordinate]:
        """All coordinates, in rank order."""
        return itertools.product(*(range(size) for size in self.sizes))

    @property
    def held_coordinates(self) -> tuple[Coordinate, ...]:
        """The coordinates of the ranks that run in this process, in rank order.

        Raises:
            MeshError: the mesh is abstract: it has no running ranks; or it is distributed, and not over this process.
        """
        if self.runtime is Runtime.ABSTRACT:
            raise MeshError(f"An abstract mesh holds no data (got {self}). Use runtime='virtual'.")
        return _held_coordinates(self, process_index() if self.runtime is Runtime.DISTRIBUTED else None)

    def require_processes(self) -> None:
        """Check that ranks of the mesh run in this process.

        Raises:
            MeshError: as `held_coordinates`.
        """
        _ = self.held_coordinates

    def axis_index(self, coordinate: Coordinate, axes: Sequence[str]) -> int:
        """The index of a coordinate along several axes flattened into one (row-major: the first axis is major)."""
        index = 0
        for name in axes:
            position = self.axis_position(name)
            index = index * self.sizes[position] + coordinate[position]
        return index

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only along `axes`; within a group, ranks are in `axis_index` order.

        >>> make_mesh({"data": 2, "model": 2}, runtime="virtual").groups(("data",))
        ((0, 2), (1, 3))
        """
        positions = [self.axis_position(name) for name in axes]
        groups: dict[Coordinate, list[tuple[int, int]]] = {}
        for rank, coordinate in enumerate(self.coordinates()):
            rest = tuple(index for position, index in enumerate(coordinate) if position not in positions)
            groups.setdefault(rest, []).append((self.axis_index(coordinate, axes), rank))
        return tuple(tuple(rank for _, rank in sorted(group)) for group in groups.values())

    @hides_internals
    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        """The submesh along one or several axes, in their order: on a distributed mesh the one over this process.

        The idea is that of torch's `DeviceMesh`.

        Raises:
            MeshError: an unknown axis, or one that is named twice; or the mesh is distributed, and not over this
                process.

        >>> print(make_mesh({"data": 2, "model": 4}, runtime="virtual")["model"])
        Mesh(model=4)
        """
        names = axes if isinstance(axes, tuple) else (axes,)
        sizes, ranks = tuple(self.sizes[self.axis_position(name)] for name in names), None
        if self.runtime is Runtime.DISTRIBUTED:
            mine = self.rank(self.held_coordinates[0])
            along = next(group for group in self.groups(names) if mine in group)
            ranks = [self.ranks[rank] for rank in along]
        return Mesh(names, sizes, self.runtime, self.device, ranks)

    __iter__ = None  # or else Python would try mesh[0], mesh[1], ...

    def __str__(self) -> str:
        said = [f"{name}={size}" for name, size in self.axes.items()]
        return f"Mesh({', '.join(said if self._ranks is None else [*said, f'ranks={_shown(self._ranks)}'])})"

    @property
    def picture(self) -> Picture:
        """Where each rank is in the grid; see `spmd.visualize`."""
        dims = tuple(
            Dim(f"{name} ({size})", (name,), tuple((i, i + 1) for i in range(size)), tuple(map(str, range(size))))
            for name, size in self.axes.items()
        )
        return Picture(Blocks(str(self), self.axes, self.ranks, dims))

    def _repr_html_(self) -> str:
        return self.picture._repr_html_()


@hides_internals
def make_mesh(
    axes: Mapping[str, int],
    *,
    runtime: Literal["auto", "virtual", "distributed", "abstract"] = "auto",
    device: torch.device | str | None = None,
    ranks: Iterable[int] | None = None,
) -> Mesh:
    """Make a mesh of ranks with named axes.

    Args:
        axes: the size of each axis, by name, in rank order (the last axis varies fastest).
        runtime: `"virtual"` (all ranks in this process), `"distributed"` (one rank per process; calls `init` if
            torch.distributed is not initialized yet), `"abstract"` (planning only), or `"auto"`: distributed under
            torchrun, `srun` or `mpirun`, else virtual.
        device: the device of the shards, by default the CPU. On a distributed mesh `"cuda"` is the local rank's GPU.
        ranks: the processes of a distributed mesh by their numbers in the job, in rank order, such as `range(4)`; by
            default all of the job. Every process may make the mesh, but only those in `mesh.ranks` may run anything on
            it; the others can plan for it.

    Raises:
        MeshError: no axis, a repeated or malformed name, a size below 1, a runtime or a device that is not available,
            a distributed mesh whose size is not the number of processes, or ranks that are not distinct processes of
            the job, one for each rank of a distributed mesh.

    >>> mesh = make_mesh({"data": 2, "model": 4})
    >>> mesh.size, mesh.coordinate(5)
    (8, (1, 1))
    """
    if not isinstance(axes, Mapping):
        raise MeshError(f"axes must map names to sizes, as make_mesh({{'data': 2, 'model': 4}}) (got {axes!r}).")
    if runtime == "auto":
        runtime = "distributed" if is_distributed() else "virtual"
    if runtime not in tuple(choice.value for choice in Runtime):
        raise MeshError(f"runtime must be 'auto', 'virtual', 'distributed' or 'abstract' (got {runtime!r}).")
    mesh = Mesh(tuple(axes), tuple(axes.values()), Runtime(runtime), _parse_device(device or "cpu"))
    if ranks is not None:
        mesh = attrs.evolve(mesh, ranks=_parse_ranks(mesh, ranks))
    if mesh.runtime is Runtime.DISTRIBUTED:
        return _join(mesh, all_processes=ranks is None)
    if mesh.runtime is Runtime.VIRTUAL:
        _check_available(mesh.device)
    return mesh


def _join(mesh: Mesh, *, all_processes: bool) -> Mesh:
    """The distributed mesh, of which this process may be a rank: initializes torch.distributed, chooses the device."""
    count = process_count()
    if is_distributed() and all_processes and mesh.size != count:
        some = f", or choose some of them: make_mesh(..., ranks=range({mesh.size}))" if mesh.size < count else ""
        raise MeshError(
            f"{mesh} has {mesh.size} ranks, but the job has {count} processes. Choose axes whose product is "
            f"{count}, or start the script by `torchrun --nproc-per-node {mesh.size}`{some}."
        )
    if is_distributed() and not all_processes and max(mesh.ranks) >= count:
        raise MeshError(
            f"ranks must be processes of the job, which has the {count} of 0 to {count - 1} (got "
            f"{_shown(mesh.ranks)}). Choose others, or start more by `torchrun --nproc-per-node {max(mesh.ranks) + 1}`."
        )
    device = choose_device(mesh.device)
    _check_available(device)
    start()
    return attrs.evolve(mesh, device=device)


def _parse_ranks(mesh: Mesh, ranks: Iterable[int]) -> tuple[int, ...]:
    """The argument `ranks` of `make_mesh`, checked."""
    if mesh.runtime is not Runtime.DISTRIBUTED:
        raise MeshError(
            f"ranks are the processes of a distributed mesh (got ranks={ranks!r} for {mesh}, which is "
            f"{mesh.runtime.value}). Leave them out here, or start the script by torchrun."
        )
    try:
        found = tuple(map(operator.index, ranks))
    except TypeError:
        raise MeshError(f"ranks must be numbers of processes, such as range({mesh.size}) (got {ranks!r}).") from None
    _check_processes(mesh, found)
    return found


def _check_processes(mesh: Mesh, ranks: tuple[int, ...]) -> None:
    if mesh.runtime is not Runtime.DISTRIBUTED:
        raise MeshError(f"Only a distributed mesh has ranks of its own (got ranks={_shown(ranks)} for {mesh.runtime}).")
    if len(ranks) != mesh.size or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        axes = ", ".join(f"{name}={size}" for name, size in mesh.axes.items())
        raise MeshError(
            f"ranks must be {mesh.size} different processes for the axes {axes} (got {len(ranks)}: {_shown(ranks)}). "
            f"Give one for each rank of the mesh, such as range({mesh.size})."
        )


def _shown(ranks: Sequence[int]) -> str:
    """Numbers of processes, as a call of `make_mesh` has them; of many, the first ones."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"range({ranks[0]}, {ranks[-1] + 1})"
    return str(tuple(ranks)) if len(ranks) <= MOST else f"({', '.join(map(str, ranks[:MOST]))}, ...)"


@lru_cache(maxsize=256)
def _held_coordinates(mesh: Mesh, process: int | None) -> tuple[Coordinate, ...]:
    if process is None:
        return tuple(mesh.coordinates())
    if process not in mesh.ranks:
        raise MeshError(
            f"This process is rank {process} of the job, and {mesh} has {name_ranks(mesh.ranks)}. Guard what runs on "
            "the mesh: `if spmd.process_index() in mesh.ranks:`."
        )
    return (mesh.coordinate(mesh.ranks.index(process)),)


def _parse_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise MeshError(f"device must be one of torch's, as 'cpu' or 'cuda' (got {device!r}).") from None


def _check_available(device: torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise MeshError(
            f"Device {str(device)!r} is not available here ({reason}). "
            "Pass another device, or runtime='abstract' to plan for it only."
        ) from None


_default_mesh: ContextVar[Mesh | None] = ContextVar("spmd_default_mesh", default=None)


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Make `mesh` the default mesh inside the `with` block.

    Raises:
        MeshError: `mesh` is not a Mesh.

    >>> with use_mesh(make_mesh({"data": 2})) as mesh:
    ...     current_mesh() is mesh
    True
    """
    token = _default_mesh.set(check_mesh(mesh))
    try:
        yield mesh
    finally:
        _default_mesh.reset(token)


def default_mesh() -> Mesh | None:
    """The mesh set by `use_mesh`, if there is one."""
    return _default_mesh.get()


def current_mesh(mesh: Mesh | None = None) -> Mesh:
    """`mesh` if one is given, else the default set by `use_mesh`; MeshError if there is neither."""
    found = _default_mesh.get() if mesh is None else check_mesh(mesh)
    if found is None:
        raise MeshError("No mesh was given and none is set. Pass mesh=... or enter `with spmd.use_mesh(mesh):`.")
    return found


def check_mesh(mesh: Mesh) -> Mesh:
    """Return `mesh`; MeshError if it is not a Mesh."""
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh must be a Mesh (got {type(mesh).__name__} {mesh!r:.60}). Make one: spmd.make_mesh(...).")
    return mesh
