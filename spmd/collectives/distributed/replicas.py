"""Values that ranks hold alike if they differ only along some mesh axes: replicas, and what differs between them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import attrs
import torch
from torch import Tensor

from spmd.collectives.transport.group import groups
from spmd.core.mesh import Mesh
from spmd.core.placement import Placement, Replicate
from spmd.core.spec import DTensorSpec, P
from spmd.job.collective_scope import who_says_what

WIDTH = 16
"""The bytes of a digest."""


def digest_of(text: str | bytes) -> bytes:
    """A digest of what ranks say."""
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=WIDTH).digest()


@attrs.frozen
class Replica:
    """A value of this rank: its name, the axes along which other ranks have the same, and a digest or description."""

    name: str
    axes: tuple[str, ...]
    text: str


@lru_cache(maxsize=4096)
def replicated_axes(mesh: Mesh, spec: P | DTensorSpec | tuple[Placement, ...]) -> tuple[str, ...]:
    """The axes of `long_axes` along which ranks hold equal shards."""
    if isinstance(spec, (P, DTensorSpec)):
        used = {axis for axes in spec.dims for axis in axes} | {axis for axis, _ in spec.partial}
    else:
        used = {axis for axis, placement in zip(mesh.names, spec, strict=False) if not isinstance(placement, Replicate)}
    return tuple(axis for axis in long_axes(mesh) if axis not in used)


def long_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes with more than one rank: at most log2 of the number of ranks."""
    return tuple(axis for axis, size in mesh.axes.items() if size > 1)


def digests_along(mesh: Mesh, replicas: Iterable[Replica]) -> list[bytes]:
    """For each axis of `long_axes`, a digest of what is replicated along it."""
    held = list(replicas)
    return [digest_of(repr([(item.name, item.text) for item in held if axis in item.axes])) for axis in long_axes(mesh)]


def slots(ranks: int) -> int:
    """How many axes longer than 1 a mesh of so many ranks can have."""
    return int(math.log2(ranks))


def are_equal_along(mesh: Mesh, digests: Tensor) -> bool:
    """Whether ranks that differ only along an axis have the same digest for it.

    Args:
        mesh: the mesh.
        digests: in rank order, for each axis of `long_axes`, `WIDTH` bytes; more may follow.
    """
    for number, axis in enumerate(long_axes(mesh)):
        along = digests[:, number].view(*mesh.sizes, WIDTH)
        position = mesh.axis_position(axis)
        if not torch.equal(along, along.narrow(position, 0, 1).expand_as(along)):
            return False
    return True


def difference(mesh: Mesh, every: Sequence[Sequence[Replica]]) -> str | None:
    """The first replica that differs between ranks that must hold the same, and which holds what; None if none does."""
    processes = mesh.ranks
    for replicas in zip(*every, strict=False):
        for group in groups(mesh, replicas[0].axes):
            texts = {processes[rank]: replicas[rank].text for rank in sorted(group.ranks)}
            if len(set(texts.values())) > 1:
                which = "" if len(texts) == mesh.size else f", which differ only along {', '.join(replicas[0].axes)}"
                return f"{replicas[0].name} differs between ranks{which}: {who_says_what(texts)}"
    return None
