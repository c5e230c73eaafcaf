"""Views, and operators that copy, reorder, join or drop elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import attrs
import torch

from spmd.collectives import shard_offset
from spmd.core.placement import Shard
from spmd.ir.call import Call
from spmd.rules.builders import along, dim_names, rule
from spmd.rules.notation import Rows, by_call, factors, term
from spmd.rules.ops.diagonals import read_diagonal, write_diagonal
from spmd.rules.ops.owners import read_range, spread_range, write_range
from spmd.rules.ops.sliding import unfold_windows
from spmd.rules.ops.windows import (
    cat_window,
    flip_window,
    pad_window,
    roll_window,
    slice_backward_window,
    slice_scatter_window,
    slice_window,
    split_window,
)
from spmd.rules.partial import carry, increasing, linear
from spmd.rules.rule import Axes, FactorDims, Factors, Row, Rule, table


def common_factors(source: Sequence[int], target: Sequence[int]) -> tuple[FactorDims, FactorDims, dict[str, int]]:
    """The common factors of two shapes with equally many elements: every dim of either is a product of them.

    Dims that have no common factorization, such as those of `(2, 3)` and `(3, 2)`, get no factors.

    Returns:
        The factors of every dim of `source`, those of every dim of `target`, and the length of each factor.

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
    """For every dim of a block, the product of it and the dims after it."""
    return [math.prod(shape[dim] for dim in block[i:]) for i in range(len(block))]


def _blocks(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of consecutive dims of both shapes with equal products, without dims of length 1."""
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


def _permutation(order: Callable[[Call], Sequence[int]]) -> Rule:
    """The rule of an operator that permutes dims: `order(call)` gives, for every result dim, its operand dim."""

    def choose(call: Call) -> Rule:
        names = dim_names(call.operands[0].ndim)
        return factors(f"{term(names)} -> {term(names[dim] for dim in order(call))}", carry("self"))

    return by_call(choose)


def _transposed(call: Call) -> list[int]:
    order = list(range(call.operands[0].ndim))
    if order:
        first, second = call.argument("dim0"), call.argument("dim1")
        order[first], order[second] = order[second], order[first]
    return order


def _same_dims(call: Call, changed: Collection[int], *rows: Rows) -> Rule:
    """All dims can be sharded except those in `changed`, counted from the last dim, and those whose length changes."""
    (operand,), (result,) = call.operands, call.results
    names = dim_names(result.ndim)
    old = (0,) * (result.ndim - operand.ndim) + operand.shape
    fixed = {name for i, name in enumerate(names) if result.ndim - 1 - i in changed or old[i] != result.shape[i]}
    return factors(f"[{term(names, fixed)}] -> {term(names, fixed)}", *rows)


def _slice(call: Call) -> Rule:
    return _same_dims(call, (), carry("self"), read_range, slice_window)


def _pad(call: Call) -> Rule:
    """Only dims without padding can be sharded: with a crop on the other side, a padded dim may keep its length."""
    padded = {i // 2 for i, amount in enumerate(call.argument("pad")) if amount}
    return _same_dims(call, padded, linear("self value"), increasing("self"), pad_window)


def _repeat(call: Call) -> Rule:
    repeated = {i for i, count in enumerate(reversed(call.argument("repeats"))) if count != 1}
    return _same_dims(call, repeated, carry("self"))


def _windows(dim: str, *rows: Rows, size_argument: int | None = None) -> Rule:
    """Windows along the dim that the argument `dim` gives become a new last dim (`unfold`), or the reverse."""

    def choose(call: Call) -> Rule:
        ndim = min(call.operands[0].ndim, call.results[0].ndim)
        names = dim_names(ndim)
        narrow = term(names, names[call.argument(dim) % ndim] if ndim else ())
        placed = {ndim: narrow, ndim + 1: f"{narrow} _"}
        return factors(f"{placed[call.operands[0].ndim]} -> {placed[call.results[0].ndim]}", *rows)

    return by_call(choose, size_argument=size_argument)


def _diagonal(arguments: str, rows: Rows) -> Rule:
    """The first operand has matrices in the dims `dim1` and `dim2`, other operands diagonals, and the result either."""

    def choose(call: Call) -> Rule:
        ndim = call.operands[0].ndim
        names = dim_names(ndim)
        fixed = {names[call.argument(name) % ndim] for name in ("dim1", "dim2")}
        matrices, diagonals = term(names, fixed), f"{term(name for name in names if name not in fixed)} _"
        result = matrices if call.results[0].ndim == ndim else diagonals
        return factors(f"{matrices}, {diagonals} -> {result}", carry(arguments), rows)

    return by_call(choose)


@attrs.frozen
class _Triangle:
    """`tril` or `triu` of matrices whose dim `cut` (-2 or -1) is sharded: the diagonal moves with the shard."""

    lower: bool
    cut: int

    def __call__(self, axes: Axes, call: Call, x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
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


_VIEW = (_view, carry("self"))

VIEWS = table({
    "view _unsafe_view reshape": rule(*_VIEW, size_argument=1),
    "unsqueeze": rule(*_VIEW),
    "permute": _permutation(lambda call: call.argument("dims")),
    "transpose.int": _permutation(_transposed),
    "t": _permutation(lambda call: range(call.operands[0].ndim)[::-1]),
    "expand": factors("... -> ...", carry("self"), size_argument=1),
    "unfold": _windows("dimension", carry("self"), unfold_windows),
    "diagonal": _diagonal("self", read_diagonal),
})  # fmt: skip

MOVES = table({
    "cat": along(carry("tensors"), cat_window),
    "stack": along(carry("tensors")),
    "split.Tensor split_with_sizes": along(carry("self"), split_window),
    "unbind.int": along(carry("self")),
    "select.int": along(carry("self"), read_range),
    "select_backward": along(carry("grad_output"), spread_range, size_argument=1),
    "slice_backward": along(carry("grad_output"), spread_range, slice_backward_window, size_argument=1),
    "select_scatter": along(carry("self src"), write_range),
    "slice_scatter": along(carry("self src"), write_range, slice_scatter_window),
    "slice.Tensor": by_call(_slice),
    "repeat": by_call(_repeat),
    "constant_pad_nd": by_call(_pad),
    "unfold_backward": _windows("dim", linear("grad_in"), unfold_windows, size_argument=1),
    "diagonal_scatter": _diagonal("self src", write_diagonal),
    "flip": along(carry("self"), flip_window, dims="dims"),
    "roll": along(carry("self"), roll_window, dims="dims"),
    "tril": _triangle(lower=True),
    "triu": _triangle(lower=False),
    "mode median.dim nanmedian.dim sort sort.stable": along(),
})  # fmt: skip
