"""Views and moves: operators that copy, arrange, join or drop elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch

from spmd.collectives import shard_offset
from spmd.placement import Shard
from spmd.rules.builders import aligned, along, cut_all, dim_names, rule
from spmd.rules.notation import factors
from spmd.rules.partial import carry, increasing, linear
from spmd.rules.rule import Call, FactorDims, Factors, Row, Rule

aten = torch.ops.aten


def common_factors(source: Sequence[int], target: Sequence[int]) -> tuple[FactorDims, FactorDims, dict[str, int]]:
    """The factors of two shapes of one tensor, cut at the bounds of both shapes' dims.

    Dims between which no chain of divisors can be found get no factor.

    >>> common_factors((6, 4), (2, 3, 4))
    ((('f0', 'f1'), ('f2',)), (('f0',), ('f1',), ('f2',)), {'f0': 2, 'f1': 3, 'f2': 4})
    """
    dims: tuple[list[tuple[str, ...]], list[tuple[str, ...]]] = ([()] * len(source), [()] * len(target))
    sizes: dict[str, int] = {}
    for left, right in _blocks(source, target):
        bounds = sorted({1, *_bounds(source, left), *_bounds(target, right)})
        if any(outer % inner for inner, outer in itertools.pairwise(bounds)):
            continue
        lengths = [outer // inner for inner, outer in itertools.pairwise(bounds)]
        names = [f"f{len(sizes) + i}" for i in reversed(range(len(lengths)))]
        sizes.update(zip(reversed(names), reversed(lengths), strict=True))
        for side, shape, block in zip(dims, (source, target), (left, right), strict=True):
            inner = 1
            for dim in reversed(block):
                inside = [i for i in range(len(lengths)) if inner <= bounds[i] and bounds[i + 1] <= inner * shape[dim]]
                side[dim] = tuple(names[i] for i in reversed(inside))
                inner *= shape[dim]
    return tuple(dims[0]), tuple(dims[1]), sizes


def _bounds(shape: Sequence[int], block: Sequence[int]) -> list[int]:
    """The products of the trailing dims of a block."""
    return [math.prod(shape[dim] for dim in block[i:]) for i in range(len(block))]


def _blocks(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dims of both shapes with equal products, dims of length 1 left out."""
    if 0 in source:
        equal = itertools.takewhile(lambda i: source[i] == target[i], range(min(len(source), len(target))))
        return [([dim], [dim]) for dim in equal if source[dim] > 1]
    left, right = ([dim for dim, size in enumerate(shape) if size != 1] for shape in (source, target))
    blocks: list[tuple[list[int], list[int]]] = []
    while left and right:
        first, second = [left.pop(0)], [right.pop(0)]
        while (difference := _size(source, first) - _size(target, second)) != 0:
            if difference < 0:
                first.append(left.pop(0))
            else:
                second.append(right.pop(0))
        blocks.append((first, second))
    return blocks


def _size(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[dim] for dim in dims)


def _view(call: Call) -> Factors:
    source, target, sizes = common_factors(call.operands[0].shape, call.results[0].shape)
    return Factors((source,), (target,), sizes)


def _permutation(call: Call, order: Sequence[int]) -> Factors:
    (operand,) = call.operands
    names = dim_names(operand.ndim)
    moved = tuple((names[dim % operand.ndim],) for dim in order)
    return Factors((cut_all(operand.shape, names),), (moved,), dict(zip(names, operand.shape, strict=True)))


def _permute(call: Call) -> Factors:
    return _permutation(call, call.argument("dims"))


def _transpose(call: Call) -> Factors:
    ndim = call.operands[0].ndim
    order = list(range(ndim))
    if ndim:
        first, second = (call.argument(name) % ndim for name in ("dim0", "dim1"))
        order[first], order[second] = order[second], order[first]
    return _permutation(call, order)


def _t(call: Call) -> Factors:
    return _permutation(call, range(call.operands[0].ndim)[::-1])


def _expand(call: Call) -> Factors:
    (operand,), (result,) = call.operands, call.results
    names = dim_names(result.ndim)
    return Factors(
        (aligned(operand, names, result.shape),),
        (cut_all(result.shape, names),),
        dict(zip(names, result.shape, strict=True)),
    )


def _repeat(call: Call) -> Factors:
    (operand,), (result,) = call.operands, call.results
    names = dim_names(result.ndim)
    offset = result.ndim - operand.ndim
    repeats: Sequence[int] = call.argument("repeats")
    fixed = {name for i, name in enumerate(names) if i < offset or repeats[i] != 1}
    sizes = {name: size for name, size in zip(names, result.shape, strict=True) if name not in fixed}
    return Factors((cut_all(operand.shape, names[offset:], fixed),), (cut_all(result.shape, names, fixed),), sizes)


def _same_sizes(call: Call) -> Factors:
    """Dims whose length stays are cut, as in a slice of everything; others are not."""
    operand, result = call.operands[0].shape, call.results[0].shape
    names = dim_names(len(operand))
    sizes = {n: size for n, size, other in zip(names, operand, result, strict=True) if size == other}
    fixed = set(names) - sizes.keys()
    return Factors((cut_all(operand, names, fixed),), (cut_all(result, names, fixed),), sizes)


def _pad(call: Call) -> Factors:
    """Only dims without padding are cut: a pad and a crop may leave a length as it was."""
    found = _same_sizes(call)
    pad: Any = call.argument("pad")
    ndim = call.operands[0].ndim
    padded = {f"d{ndim - 1 - i // 2}" for i, amount in enumerate(pad) if amount}
    return Factors(found.operands, found.results, found.sizes, replicate=frozenset(padded & found.sizes.keys()))


def _windows(call: Call, dim: str) -> Factors:
    """Windows along the dim that the argument `dim` names become a dim of their own, the last; or the other way."""
    wide, narrow = sorted((*call.operands, *call.results), key=lambda meta: -meta.ndim)
    names = dim_names(narrow.ndim)
    fixed = {names[call.argument(dim) % narrow.ndim]} if narrow.ndim else set()
    sizes = {name: size for name, size in zip(names, narrow.shape, strict=True) if name not in fixed}
    placed = {narrow.ndim: cut_all(narrow.shape, names, fixed)}
    placed[wide.ndim] = (*placed[narrow.ndim], ())
    return Factors((placed[call.operands[0].ndim],), (placed[call.results[0].ndim],), sizes)


def _diagonal(call: Call) -> Factors:
    """Of matrices in the dims `dim1` and `dim2`; operands are the matrices first, results those or the diagonals."""
    matrices = call.operands[0]
    names = dim_names(matrices.ndim)
    fixed = {names[call.argument(name) % matrices.ndim] for name in ("dim1", "dim2")}
    kept = [name for name in names if name not in fixed]
    sizes = {name: size for name, size in zip(names, matrices.shape, strict=True) if name not in fixed}
    whole, diagonals = cut_all(matrices.shape, names, fixed), (*((name,) for name in kept), ())
    results = tuple(whole if meta.ndim == matrices.ndim else diagonals for meta in call.results)
    return Factors((whole, *(diagonals for _ in call.operands[1:])), results, sizes)


@attrs.frozen
class _Triangle:
    """Keeps the elements of matrices at one side of a diagonal where the dim `cut` is cut: by where the shard lies."""

    lower: bool
    cut: int

    def __call__(self, axes: tuple[str, ...], call: Call, x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
        places = [torch.arange(size, device=x.device) for size in x.shape[-2:]]
        places[self.cut] = places[self.cut] + shard_offset(call.operands[0].shape[self.cut], axes)
        above = places[1] - places[0].unsqueeze(1) - diagonal
        return torch.where(above <= 0 if self.lower else above >= 0, x, torch.zeros_like(x))


def _triangle(lower: bool) -> Rule:
    def rows(call: Call) -> Iterator[Row]:
        for cut in (-2, -1):
            placed = (Shard(call.operands[0].ndim + cut),)
            yield Row(placed, placed, _Triangle(lower, cut))

    return factors("... _ _ -> ... _ _", carry("self"), rows)


_ALONG = along(carry("self"))

VIEWS: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.view.default: rule(_view, carry("self"), size_argument=1),
        aten._unsafe_view.default: rule(_view, carry("self"), size_argument=1),
        aten.reshape.default: rule(_view, carry("self"), size_argument=1),
        aten.unsqueeze.default: rule(_view, carry("self")),
        aten.permute.default: rule(_permute, carry("self")),
        aten.transpose.int: rule(_transpose, carry("self")),
        aten.t.default: rule(_t, carry("self")),
        aten.expand.default: rule(_expand, carry("self"), size_argument=1),
        aten.unfold.default: rule(lambda call: _windows(call, "dimension"), carry("self")),
        aten.diagonal.default: rule(_diagonal, carry("self")),
    }
)

MOVES: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.repeat.default: rule(_repeat, carry("self")),
        aten.cat.default: along(carry("tensors")),
        aten.stack.default: along(carry("tensors")),
        aten.split.Tensor: _ALONG,
        aten.split_with_sizes.default: _ALONG,
        aten.unbind.int: _ALONG,
        aten.select.int: _ALONG,
        aten.select_backward.default: along(carry("grad_output"), size_argument=1),
        aten.select_scatter.default: along(carry("self src")),
        aten.slice.Tensor: rule(_same_sizes, carry("self")),
        aten.slice_backward.default: along(carry("grad_output"), size_argument=1),
        aten.slice_scatter.default: along(carry("self src")),
        aten.unfold_backward.default: rule(lambda call: _windows(call, "dim"), linear("grad_in"), size_argument=1),
        aten.diagonal_scatter.default: rule(_diagonal, carry("self src")),
        aten.flip.default: along(carry("self"), dims="dims"),
        aten.roll.default: along(carry("self"), dims="dims"),
        aten.constant_pad_nd.default: rule(_pad, linear("self value"), increasing("self")),
        aten.tril.default: _triangle(lower=True),
        aten.triu.default: _triangle(lower=False),
        aten.kthvalue.default: along(),
        aten.mode.default: along(),
        aten.median.dim: along(),
        aten.nanmedian.dim: along(),
        aten.sort.default: along(),
        aten.sort.stable: along(),
        aten.topk.default: along(),
    }
)
