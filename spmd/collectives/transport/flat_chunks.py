"""A tensor sharded along one dim over the ranks of a group, as a flat buffer of its chunks one after the other."""

from __future__ import annotations

import functools
import math

import attrs
import torch
from torch import Tensor

from spmd.collectives.transport.process_groups import Member


def resized(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    """`shape` with `length` as the length of `dim`."""
    return (*shape[:dim], length, *shape[dim + 1 :])


@attrs.frozen
class FlatChunks:
    """The chunks of a tensor, in the order in which torch's group numbers the ranks.

    Args:
        member: this rank's place in the group.
        shape: the shape of the whole tensor.
        dim: the dim that is sharded.
        padded: whether every chunk takes the space of the largest in the buffer.
    """

    member: Member
    shape: tuple[int, ...]
    dim: int
    padded: bool = False

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The length of `dim` in each chunk, by index along the axes."""
        return self.member.group.lengths(self.shape[self.dim])

    @property
    def is_even(self) -> bool:
        """Whether chunks are equal and in the order of the axes, so that one copy converts to or from the buffer."""
        return self.member.in_order and len(set(self.lengths)) == 1

    def piece_shape(self, index: int) -> tuple[int, ...]:
        """The shape of the chunk of the rank at `index` along the axes."""
        return resized(self.shape, self.dim, self.lengths[index])

    @property
    def numels(self) -> list[int]:
        """The number of elements that each chunk takes in the buffer, in torch's order."""
        found = [0] * self.member.group.size
        for index, place in enumerate(self.member.places):
            found[place] = math.prod(self.piece_shape(index))
        return [max(found)] * len(found) if self.padded else found

    def rows(self, x: Tensor) -> Tensor:
        """The chunks of a tensor, if they are even: a view of it with a chunk for each index of the first dim."""
        return x.unflatten(self.dim, (self.member.group.size, self.lengths[0])).movedim(self.dim, 0)

    def flatten(self, x: Tensor) -> Tensor:
        """The flat buffer of the chunks of a tensor."""
        if self.is_even:
            return self.rows(x).reshape(-1)
        by_place = dict(zip(self.member.places, x.split(self.lengths, self.dim), strict=True))
        numels = enumerate(self.numels)
        return torch.cat([pad(by_place[place].reshape(-1), numel) for place, numel in numels])

    def join(self, buffer: Tensor) -> Tensor:
        """The tensor from the flat buffer of its chunks, or from one with a row for each, if they are padded."""
        count = self.member.group.size
        if self.is_even:
            pieces = buffer.view(count, *self.piece_shape(0))
            return pieces.movedim(0, self.dim).reshape(self.shape).contiguous()
        by_place = buffer.split(self.numels) if buffer.ndim == 1 else buffer.unbind()
        shapes = [self.piece_shape(index) for index in range(count)]
        places = zip(self.member.places, shapes, strict=True)
        return torch.cat([by_place[place][: math.prod(shape)].view(shape) for place, shape in places], self.dim)


def pad(flat: Tensor, numel: int) -> Tensor:
    """A 1-d tensor padded at the end to `numel` elements, with values that nothing reads."""
    return flat if flat.numel() == numel else torch.nn.functional.pad(flat, (0, numel - flat.numel()))
