"""What a program means, in plain torch: a loop over ranks, differentiated by torch.autograd on one device.

A per-rank value is a list with one tensor for each coordinate along the manual axes. Nothing of `spmd` is used.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from types import CodeType, MappingProxyType
from typing import Any, TypeAlias

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from proofs.shard_map_fuzz.program import (
    Block,
    Collective,
    Kind,
    Layout,
    Length,
    Local,
    Program,
    Region,
    Step,
    Transform,
)

Values: TypeAlias = MutableMapping[str, list[Tensor]]
"""For each name, the value of each rank."""


@attrs.frozen
class Ranks:
    """The coordinates along manual axes, first axis major; a block outside of regions has one, without axes."""

    axes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @functools.cached_property
    def coordinates(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*map(range, self.sizes)))

    def size(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[self.axes.index(axis)] for axis in axes)

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """The index of a rank along axes taken together, the first one major."""
        found = 0
        for axis in axes:
            position = self.axes.index(axis)
            found = found * self.sizes[position] + self.coordinates[rank][position]
        return found

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The ranks that differ along `axes` only, by their index along these."""
        others = [axis for axis in self.axes if axis not in axes]
        found: dict[int, list[int]] = {}
        for rank in range(len(self.coordinates)):
            found.setdefault(self.index(rank, others), []).append(rank)
        return [sorted(group, key=lambda rank: self.index(rank, axes)) for group in found.values()]

    def inside(self, axes: Sequence[str], sizes: Sequence[int]) -> Ranks:
        """The ranks of a region inside of this one: those of this one are major."""
        return Ranks((*self.axes, *axes), (*self.sizes, *sizes))


def run_program(
    program: Program, arguments: Sequence[Tensor], entered: Callable[[Sequence[Tensor]], None] = lambda shards: None
) -> list[Tensor]:
    """The results of a program, as functions of its arguments; `entered` gets all shards that enter a region."""
    values: Values = {}
    world = World(dict(program.mesh), entered)
    for step in program.constants:
        world.run(step, Ranks(), values)
    given = [[argument] for argument in arguments]
    return [tensors[0] for tensors in world.block(program.block, Ranks(), values, given)]


@attrs.frozen
class World:
    """Runs steps on a mesh.

    Args:
        mesh: the sizes of its axes.
        entered: called with the shards of each value that enters a region.

    Steps raise a ValueError where ranks hold shapes that do not fit.
    """

    mesh: Mapping[str, int]
    entered: Callable[[Sequence[Tensor]], None] = lambda shards: None

    def block(self, block: Block, ranks: Ranks, values: Values, given: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """The results of a block for parameters, where `values` are those that it closes over."""
        inner = {**values, **dict(zip(block.params, given, strict=True))}
        for step in block.steps:
            self.run(step, ranks, inner)
        return [inner[name] for name in block.results]

    def run(self, step: Step, ranks: Ranks, values: Values) -> None:
        """Run one step, and add what it computes to `values`."""
        if isinstance(step, Local):
            values[step.target] = [
                _execute(step, {name: values[name][rank] for name in (*step.operands, *step.sizes)})
                for rank in range(len(ranks.coordinates))
            ]
        elif isinstance(step, Collective):
            values[step.target] = _collective(step, ranks, values)
        elif isinstance(step, Region):
            values.update(zip(step.targets, self._region(step, ranks, values), strict=True))
        else:
            values.update(zip(step.targets, self._transform(step, ranks, values), strict=True))

    def _region(self, step: Region, ranks: Ranks, values: Values) -> list[list[Tensor]]:
        inner = ranks.inside(step.axes, [self.mesh[axis] for axis in step.axes])
        count = math.prod(self.mesh[axis] for axis in step.axes)
        closed = {name: [x for x in tensors for _ in range(count)] for name, tensors in values.items()}
        given = [
            enter(closed[name], layout, inner) for name, layout in zip(step.operands, step.in_layouts, strict=True)
        ]
        for shards in given:
            self.entered(shards)
        results = self.block(step.block, inner, closed, given)
        return [leave(x, layout, inner, step.axes) for x, layout in zip(results, step.out_layouts, strict=True)]

    def _transform(self, step: Transform, ranks: Ranks, values: Values) -> list[list[Tensor]]:
        given = [values[name] for name in step.operands]
        function = functools.partial(self._single, step.block, ranks, values)
        if step.kind is Kind.VMAP:
            return [_vmap(function, given, step)]
        if step.kind is Kind.SCAN:
            carry = given
            for _ in range(step.trips):
                carry = [function(carry)]
            return carry
        if step.kind is Kind.COND:
            pairs = zip(values[step.extra[0]], function(given), given[0], strict=True)
            return [[x if bool(decides.sum() > 0) else other * 1 for decides, x, other in pairs]]
        if step.kind is Kind.JVP:
            return [_jvp(function, given, [values[name] for name in step.extra])]
        cotangent = values[step.extra[0]] if step.extra else None
        return _vjp(function, given, cotangent, step, ranks)

    def _single(self, block: Block, ranks: Ranks, values: Values, given: Sequence[list[Tensor]]) -> list[Tensor]:
        return self.block(block, ranks, values, given)[0]


Function: TypeAlias = Callable[[Sequence[list[Tensor]]], list[Tensor]]


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<program>", "exec")


_SIZES: dict[str, Any] = {"torch": torch, "F": F}


def _execute(step: Local, names: dict[str, Tensor]) -> Tensor:
    exec(_compiled(step.text), _SIZES, names)
    return names[step.target]


def enter(tensors: Sequence[Tensor], layout: Layout, ranks: Ranks) -> list[Tensor]:
    """Each rank's shard; of a partial value the rank at index 0 holds all, and the others zeros."""
    found = []
    for rank, x in enumerate(tensors):
        for dim, axes in enumerate(layout.dims):
            for axis in axes:
                x = _block(x, dim, ranks.size([axis]), ranks.index(rank, [axis]))
        found.append(x * 0 if ranks.index(rank, layout.partial) else x)
    return found


def _block(x: Tensor, dim: int, count: int, index: int) -> Tensor:
    """One of `count` blocks of a dim: of equal lengths but for the last ones, which are shorter or empty."""
    size = x.shape[dim]
    length = -(-size // count)
    start = min(index * length, size)
    return x.narrow(dim, start, min(length, size - start))


def blocks(x: Tensor, dim: int, counts: Sequence[int]) -> list[Tensor]:
    """The blocks of a dim over several axes, each block of the first one split over the next."""
    found = [x]
    for count in counts:
        found = [_block(part, dim, count, index) for part in found for index in range(count)]
    return found


def leave(tensors: Sequence[Tensor], layout: Layout, ranks: Ranks, axes: Sequence[str]) -> list[Tensor]:
    """The global value of each group: shards joined, summands added, and else the value of the rank at index 0."""
    found = []
    for group in ranks.groups(axes):
        pieces = {tuple(ranks.index(rank, [axis]) for axis in axes): tensors[rank] for rank in group}
        left = list(axes)
        for axis in layout.partial:
            pieces = _join(pieces, left, axis, lambda found: functools.reduce(torch.add, found))
        for dim, names in reversed(list(enumerate(layout.dims))):
            for axis in reversed(names):
                pieces = _join(pieces, left, axis, functools.partial(torch.cat, dim=dim))
        whole = pieces[(0,) * len(left)]
        shards = enter([whole.detach()] * len(tensors), layout, ranks)
        if any(tensors[rank].shape != shards[rank].shape for rank in group):
            raise ValueError(f"the ranks' shapes are not those of the blocks of {tuple(whole.shape)}")
        found.append(whole)
    return found


def _join(
    pieces: Mapping[tuple[int, ...], Tensor], left: list[str], axis: str, join: Callable[[list[Tensor]], Tensor]
) -> dict[tuple[int, ...], Tensor]:
    """Pieces joined along one axis, which is taken out of `left` and of the coordinates."""
    position = left.index(axis)
    left.remove(axis)
    found: dict[tuple[int, ...], list[Tensor]] = {}
    for coordinate in sorted(pieces):
        found.setdefault(coordinate[:position] + coordinate[position + 1 :], []).append(pieces[coordinate])
    return {coordinate: join(tensors) for coordinate, tensors in found.items()}


def _collective(step: Collective, ranks: Ranks, values: Values) -> list[Tensor]:
    count = len(ranks.coordinates)
    if step.name == "axis_index":
        return [torch.tensor(ranks.index(rank, step.axes)) for rank in range(count)]
    tensors, counts = values[step.operands[0]], [ranks.size([axis]) for axis in step.axes]
    found: list[Tensor] = list(tensors)
    for group in ranks.groups(step.axes):
        given, options = [tensors[rank] for rank in group], dict(step.options)
        size = options.pop("size", None)
        if step.name == "all_gather" and size is not None:
            _check_pieces(given, options["axis"], size, counts)
        else:
            _check_equal(x.shape for x in given)
        if step.name == "pcast":
            continue
        if isinstance(size, Length):
            lengths = [values[step.sizes[0]][rank].shape[size.dim] for rank in group]
            results = _uneven_psum_scatter(given, options["scatter_dimension"], counts, lengths)
        else:
            results = COLLECTIVES[step.name](given, **options)
        for rank, result in zip(group, results, strict=True):
            found[rank] = result
    return found


def _check_equal(shapes: Iterable[Sequence[int]]) -> None:
    found = set(map(tuple, shapes))
    if len(found) > 1:
        raise ValueError(f"ranks hold {sorted(found)}, which must be equal")


def _check_pieces(xs: Sequence[Tensor], dim: int, size: int, counts: Sequence[int]) -> None:
    """Check that values are the blocks of one that has the length `size` along a dim."""
    whole = torch.empty(*xs[0].shape[:dim], size, *xs[0].shape[dim + 1 :], device="meta")
    for x, block in zip(xs, blocks(whole, dim, counts), strict=True):
        _check_equal([x.shape, block.shape])


def _uneven_psum_scatter(xs: Sequence[Tensor], dim: int, counts: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
    """The blocks of a sum, of which the ranks expect these lengths."""
    results = blocks(functools.reduce(torch.add, xs), dim, counts)
    for x, length in zip(results, lengths, strict=True):
        _check_equal([[x.shape[dim]], [length]])
    return results


def _psum(xs: list[Tensor]) -> list[Tensor]:
    return [functools.reduce(torch.add, xs)] * len(xs)


def _all_gather(xs: list[Tensor], axis: int, tiled: bool, to: str = "varying") -> list[Tensor]:
    return [torch.cat(xs, axis) if tiled else torch.stack(xs, axis)] * len(xs)


def _equal_chunks(x: Tensor, count: int, dim: int) -> tuple[Tensor, ...]:
    if x.shape[dim] % count:
        raise ValueError(f"{count} ranks have no equal chunks of dim {dim} of {tuple(x.shape)}")
    return x.chunk(count, dim)


def _psum_scatter(xs: list[Tensor], scatter_dimension: int, tiled: bool) -> list[Tensor]:
    total = functools.reduce(torch.add, xs)
    return list(_equal_chunks(total, len(xs), scatter_dimension) if tiled else total.unbind(scatter_dimension))


def _all_to_all(xs: list[Tensor], split_axis: int, concat_axis: int, tiled: bool) -> list[Tensor]:
    if tiled:
        pieces = [_equal_chunks(x, len(xs), split_axis) for x in xs]
        return [torch.cat([piece[rank] for piece in pieces], concat_axis) for rank in range(len(xs))]
    if xs[0].shape[split_axis] != len(xs):
        raise ValueError("all_to_all splits a dim of another length")
    return [torch.stack([x.select(split_axis, rank) for x in xs], concat_axis) for rank in range(len(xs))]


def _ppermute(xs: list[Tensor], perm: Sequence[tuple[int, int]]) -> list[Tensor]:
    sources = {destination: source for source, destination in perm}
    return [xs[sources[rank]] if rank in sources else torch.zeros_like(xs[rank]) for rank in range(len(xs))]


COLLECTIVES: Mapping[str, Callable[..., list[Tensor]]] = MappingProxyType(
    {
        "psum": _psum,
        "pmean": lambda xs: [functools.reduce(torch.add, xs) / len(xs)] * len(xs),
        "pmax": lambda xs: [torch.stack(xs).amax(0)] * len(xs),  # whose gradient is divided among ties, too
        "pmin": lambda xs: [torch.stack(xs).amin(0)] * len(xs),
        "all_gather": _all_gather,
        "psum_scatter": _psum_scatter,
        "all_to_all": _all_to_all,
        "ppermute": _ppermute,
    }
)
"""Collectives as functions from the values of a group of ranks to their results."""


def _variable(x: Tensor) -> Tensor:
    """A tensor of the same value, with respect to which one can differentiate; it depends on x as x itself does."""
    return x.view_as(x) if x.requires_grad else x.detach().clone().requires_grad_()


def _vjp(
    function: Function, given: Sequence[list[Tensor]], cotangent: list[Tensor] | None, step: Transform, ranks: Ranks
) -> list[list[Tensor]]:
    """Gradients with respect to each argument: ranks have one variable along the axes where it is invariant."""
    spread: list[list[Tensor]] = []
    for tensors, shared in zip(given, step.shared, strict=True):
        spread.append(list(tensors))
        for group in ranks.groups(shared):
            _check_equal(tensors[rank].shape for rank in group)
            variable = _variable(tensors[group[0]])
            for rank in group:
                spread[-1][rank] = variable
    with torch.enable_grad():
        results = function(spread)
    terms = [group[0] for group in ranks.groups(step.counted_once)]
    pairs = [(results[rank], cotangent[rank] if cotangent else torch.ones_like(results[rank])) for rank in terms]
    flat = [x for tensors in spread for x in tensors]
    found = iter(_gradients(pairs, flat))
    return [[next(found) for _ in tensors] for tensors in spread]


def _gradients(pairs: Sequence[tuple[Tensor, Tensor]], variables: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the sum of `<result, cotangent>` over the pairs; zeros where nothing depends on a variable."""
    pairs = [(result, cotangent) for result, cotangent in pairs if result.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in variables]
    unique = list({id(x): x for x in variables}.values())
    found = torch.autograd.grad(
        [result for result, _ in pairs],
        unique,
        [cotangent for _, cotangent in pairs],
        create_graph=True,
        materialize_grads=True,
    )
    by_id = {id(x): gradient for x, gradient in zip(unique, found, strict=True)}
    return [by_id[id(x)] for x in variables]


def _jvp(function: Function, given: Sequence[list[Tensor]], tangents: Sequence[list[Tensor]]) -> list[Tensor]:
    """Tangents, as the derivative of the vjp by its cotangent: all ranks' variables move at once."""
    spread = [[_variable(x) for x in tensors] for tensors in given]
    flat = [x for tensors in spread for x in tensors]
    moves = [t for tensors in tangents for t in tensors]
    with torch.enable_grad():
        results = function(spread)
        cotangents = [torch.zeros_like(x, requires_grad=True) for x in results]
        pulled = _gradients(list(zip(results, cotangents, strict=True)), flat)
    return _gradients(list(zip(pulled, moves, strict=True)), cotangents)


def _vmap(function: Function, given: Sequence[list[Tensor]], step: Transform) -> list[Tensor]:
    """One call for each element of the batch."""
    pairs = list(zip(given, step.in_dims, strict=True))
    lengths = [[x.shape[dim]] for tensors, dim in pairs if dim is not None for x in tensors]
    _check_equal(lengths)
    ((length,), *_) = lengths
    calls = [
        function([tensors if dim is None else [x.select(dim, item) for x in tensors] for tensors, dim in pairs])
        for item in range(length)
    ]
    return [torch.stack(list(results), step.out_dim) for results in zip(*calls, strict=True)]
