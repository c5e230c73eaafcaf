"""The collectives that users call, with JAX's names and argument order, on pytrees of tensors.

`axis_name` is a mesh axis, or a tuple of them that act as one axis with the first one major. An axis is bound inside
`shard_map`. `spmd.collectives.primitives` describes differentiation. A collective of varying values casts an invariant
or reduced operand to varying, as `pcast` does, so that its gradient is summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from spmd.collectives import primitives as _primitives  # noqa: F401  (defines torch.ops.spmd)
from spmd.collectives.axis_types import AxisType
from spmd.collectives.blocks import block_size
from spmd.collectives.environment import axis_size, axis_type, resolve_axes, summing_backward
from spmd.collectives.precision import reduce_wide
from spmd.core.pytree import tree_map
from spmd.core.spec import TensorMeta
from spmd.core.value_types import NUMBERS
from spmd.errors import SpmdError

AxisName: TypeAlias = str | Sequence[str]
Tree = TypeVar("Tree")

_ops = torch.ops.spmd


def psum(x: Tree, axis_name: AxisName, *, axis_index_groups: None = None) -> Tree:
    """The sum of `x` over the ranks along `axis_name`, on all of them; `jax.lax.psum`.

    Booleans are summed as int64. A Python number is the same on all ranks: `psum(1, axis)` is the axis size.

    Args:
        x: a pytree of tensors, with equal shapes on all ranks, or of Python numbers. Along each axis a tensor is
            varying or unreduced; an invariant one is cast to varying, so its sum is the axis size times it.
        axis_name: one or several mesh axes.
        axis_index_groups: not supported: name another mesh axis instead.

    Returns:
        The sums, invariant along the axes.

    Raises:
        SpmdError: an axis that is not bound, a leaf that is neither a tensor nor a number, `axis_index_groups`, or an
            invariant gradient in the backward pass of a `torch.autograd.Function`, which is summed already.

    >>> from spmd.collectives import axis_environment
    >>> with axis_environment({"data": 2}):
    ...     psum({"count": 3}, "data")
    {'count': 6}
    """
    refuse_groups("psum", axis_index_groups)
    size = axis_size(axis_name)
    return _reduce("psum", "sum", x, axis_name, lambda number: number * size)


def pmean(x: Tree, axis_name: AxisName, *, axis_index_groups: None = None) -> Tree:
    """The mean of `x` over the ranks along `axis_name`, on all of them; floats for integers; `jax.lax.pmean`.

    Arguments and errors are those of `psum`.
    """
    refuse_groups("pmean", axis_index_groups)
    size = axis_size(axis_name)
    return tree_map(lambda total: total / size, psum(x, axis_name))  # type: ignore[arg-type, return-value]


def pmax(x: Tree, axis_name: AxisName, *, axis_index_groups: None = None) -> Tree:
    """The elementwise maximum of `x` over the ranks along `axis_name`, on all of them; `jax.lax.pmax`.

    The gradient is divided equally among the elements that equal the maximum. Arguments and errors are those of `psum`.
    """
    refuse_groups("pmax", axis_index_groups)
    return _reduce("pmax", "max", x, axis_name, lambda number: number)


def pmin(x: Tree, axis_name: AxisName, *, axis_index_groups: None = None) -> Tree:
    """The elementwise minimum of `x` over the ranks along `axis_name`, on all of them; `jax.lax.pmin`.

    The gradient is divided equally among the elements that equal the minimum. Arguments and errors are those of `psum`.
    """
    refuse_groups("pmin", axis_index_groups)
    return _reduce("pmin", "min", x, axis_name, lambda number: number)


def pcast(x: Tree, axis_name: AxisName, *, to: Literal["varying", "unreduced", "reduced"] = "varying") -> Tree:
    """`x` unchanged, but of another type along `axis_name`; `jax.lax.pcast`. No communication.

    Args:
        x: a pytree of tensors.
        axis_name: one or several mesh axes.
        to: `"varying"`: an invariant or a reduced value may differ between the ranks from here on; the gradient of an
            invariant one is summed over them. `"reduced"`: each rank computes a summand of an invariant value's
            gradient, and these are summed here. `"unreduced"`: a varying value is one summand of a value. A value that
            has the type is returned as it is.

    Raises:
        SpmdError: an axis that is not bound, a leaf that is no tensor, or a value of another type.
    """
    axes, _ = resolve_axes(axis_name)
    if to not in _CASTS:
        raise SpmdError(f"pcast: 'to' must be one of {', '.join(map(repr, _CASTS))} (got {to!r}).")

    def cast(leaf: Tensor) -> Tensor:
        for axis in axes:
            leaf = cast_along(leaf, axis, AxisType(to))
        return leaf

    return _map("pcast", cast, x)


_CASTS: dict[str, tuple[AxisType, ...]] = {
    "varying": (AxisType.INVARIANT, AxisType.REDUCED),
    "unreduced": (AxisType.VARYING,),
    "reduced": (AxisType.INVARIANT,),
}
"""The types that can be cast, for each type to which they can be."""


def cast_along(x: Tensor, axis: str, to: AxisType) -> Tensor:
    """A per-rank value as one of another type along one axis; unchanged if it has the type."""
    held = axis_type(x, axis) or _CASTS[to][0]
    if held is to:
        return x
    if held not in _CASTS.get(to, ()):
        raise SpmdError(f"A value {TensorMeta.of(x)} that is {held} along {axis!r} cannot be cast to {to}.")
    return _ops.pcast(x, held.value, to.value, [axis])  # type: ignore[no-any-return]


def varying(x: Tensor, axes: Sequence[str]) -> Tensor:
    """The value, cast to varying along the axes where it is invariant or reduced."""
    for axis in axes:
        x = x if axis_type(x, axis) is None else cast_along(x, axis, AxisType.VARYING)
    return x


def _is_unreduced(x: Tensor, axes: Sequence[str]) -> bool:
    """Whether a value is unreduced along all of the axes; SpmdError if along some of them only."""
    unreduced = [axis for axis in axes if axis_type(x, axis) is AxisType.UNREDUCED]
    if unreduced and len(unreduced) < len(axes):
        raise SpmdError(
            f"A value {TensorMeta.of(x)} is unreduced along {', '.join(unreduced)} of the axes {', '.join(axes)}, and "
            "not along the others. Call one collective for each."
        )
    return bool(unreduced)


def all_gather(
    x: Tree,
    axis_name: AxisName,
    *,
    axis: int = 0,
    tiled: bool = False,
    to: Literal["varying", "invariant", "reduced"] = "varying",
    size: int | None = None,
    axis_index_groups: None = None,
) -> Tree:
    """The values of `x` on all ranks along `axis_name`, stacked or joined, on all of them; `jax.lax.all_gather`.

    Args:
        x: a pytree of tensors.
        axis_name: one or several mesh axes.
        axis: the dim of the result along which values are stacked or joined.
        tiled: join along the existing dim `axis` instead of stacking along a new one.
        to: the type of the result along the axes.
        size: the length of dim `axis` in a tiled result, if the ranks hold uneven chunks, those of `torch.chunk` for
            that length. By default chunks have equal lengths.

    Raises:
        SpmdError: an axis that is not bound, a dim out of range, or a size without `tiled`.

    >>> from spmd.collectives import axis_environment
    >>> with axis_environment({"data": 4}):
    ...     all_gather(torch.empty(2, 3, device="meta"), "data", axis=1, tiled=True).shape
    torch.Size([2, 12])
    """
    refuse_groups("all_gather", axis_index_groups)
    axes, _ = resolve_axes(axis_name)
    if size is not None and not tiled:
        raise SpmdError(f"all_gather: 'size' is for tiled=True only (got size={size}).")
    if to not in _GATHERS:
        raise SpmdError(f"all_gather: 'to' must be one of {', '.join(map(repr, _GATHERS))} (got {to!r}).")
    count = axis_size(axes)

    def gather(leaf: Tensor) -> Tensor:
        dim = _dim("all_gather", "axis", axis, leaf.ndim + (not tiled))
        leaf = varying(leaf if tiled else leaf.unsqueeze(dim), axes)
        length = leaf.shape[dim] * count if size is None else size
        return getattr(_ops, _GATHERS[to])(leaf, dim, length, axes)  # type: ignore[no-any-return]

    return _map("all_gather", gather, x)


_GATHERS = {"varying": "all_gather", "invariant": "all_gather_invariant", "reduced": "all_gather_reduced"}


def psum_scatter(
    x: Tree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    size: int | None = None,
    axis_index_groups: None = None,
) -> Tree:
    """This rank's chunk of the sum of `x` over the ranks along `axis_name`; `jax.lax.psum_scatter`.

    Args:
        x: a pytree of tensors, of equal shapes on all ranks.
        axis_name: one or several mesh axes.
        scatter_dimension: the dim that is split.
        tiled: keep the dim, with the length of a chunk; if False it is removed, and its length must be the number of
            ranks.
        size: the length of this rank's chunk, if chunks are uneven (those of `torch.chunk`). By default they have equal
            lengths.

    Raises:
        SpmdError: an axis that is not bound, a dim out of range, or a length that does not fit.

    >>> from spmd.collectives import axis_environment
    >>> with axis_environment({"data": 4}):
    ...     psum_scatter(torch.empty(8, 3, device="meta"), "data", tiled=True).shape
    torch.Size([2, 3])
    """
    refuse_groups("psum_scatter", axis_index_groups)
    axes, _ = resolve_axes(axis_name)
    if size is not None and not tiled:
        raise SpmdError(f"psum_scatter: 'size' is for tiled=True only (got size={size}).")
    count = axis_size(axes)

    def scatter(leaf: Tensor) -> Tensor:
        dim = _dim("psum_scatter", "scatter_dimension", scatter_dimension, leaf.ndim)
        if size is None:
            _check_split("psum_scatter", leaf, dim, count, tiled)
        leaf = leaf.to(torch.int64) if leaf.dtype == torch.bool else leaf
        length = leaf.shape[dim] // count if size is None else size
        unreduced = _is_unreduced(leaf, axes)
        scattered = _ops.reduce_scatter_unreduced if unreduced else _ops.reduce_scatter
        leaf = leaf if unreduced else varying(leaf, axes)
        result = reduce_wide(leaf, "sum", lambda wide: scattered(wide, "sum", dim, length, axes))
        return result if tiled else result.squeeze(dim)

    return _map("psum_scatter", scatter, x)


def all_to_all(
    x: Tree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    axis_index_groups: None = None,
    sizes: tuple[int, int] | None = None,
) -> Tree:
    """Split `split_axis`, send the i-th chunk to the i-th rank, stack or join those received; `jax.lax.all_to_all`.

    Args:
        x: a pytree of tensors, of equal shapes on all ranks.
        axis_name: one or several mesh axes.
        split_axis: the dim of `x` that is split into equal chunks.
        concat_axis: the dim of the result along which chunks are stacked or joined, in the order of the ranks.
        tiled: keep both dims: chunks of `split_axis` are joined along `concat_axis`. If False, `split_axis` is removed,
            its length must be the number of ranks, and `concat_axis` is a new dim.
        sizes: with `tiled`, the lengths of `split_axis` and `concat_axis` in the result, where chunks are those of a
            `DTensorSpec` and may be uneven; JAX has no such argument.

    Raises:
        SpmdError: an axis that is not bound, a dim out of range, or a length that the number of ranks does not divide.

    >>> from spmd.collectives import axis_environment
    >>> with axis_environment({"data": 4}):
    ...     all_to_all(torch.empty(8, 3, device="meta"), "data", 0, 1, tiled=True).shape
    torch.Size([2, 12])
    """
    refuse_groups("all_to_all", axis_index_groups)
    axes, _ = resolve_axes(axis_name)
    count = axis_size(axes)

    def exchange(leaf: Tensor) -> Tensor:
        leaf = varying(leaf, axes)
        split = _dim("all_to_all", "split_axis", split_axis, leaf.ndim)
        concat = _dim("all_to_all", "concat_axis", concat_axis, leaf.ndim)
        if sizes is not None:
            return _ops.all_to_all(leaf, split, concat, *sizes, axes)
        _check_split("all_to_all", leaf, split, count, tiled)
        if not tiled:
            pieces = _ops.all_to_all(leaf.movedim(split, 0).unsqueeze(1), 0, 1, 1, count, axes)
            return pieces.squeeze(0).movedim(0, concat)
        if split == concat:
            pieces = leaf.unflatten(split, (count, -1)).movedim(split, 0).unsqueeze(1)
            return _ops.all_to_all(pieces, 0, 1, 1, count, axes).squeeze(0).movedim(0, split).flatten(split, split + 1)
        return _ops.all_to_all(leaf, split, concat, leaf.shape[split] // count, leaf.shape[concat] * count, axes)

    return _map("all_to_all", exchange, x)


def ppermute(x: Tree, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Tree:
    """Send `x` from rank to rank; a rank to which nothing is sent gets zeros; `jax.lax.ppermute`.

    Args:
        x: a pytree of tensors, of equal shapes on all ranks.
        axis_name: one or several mesh axes.
        perm: pairs (source, destination) of indices along `axis_name`; sources and destinations must be unique.

    Raises:
        SpmdError: an axis that is not bound, or an index that is out of range or repeated.

    >>> from spmd.collectives import axis_environment
    >>> with axis_environment({"data": 2}):
    ...     ppermute(torch.empty(3, device="meta"), "data", [(0, 1), (1, 0)]).shape
    torch.Size([3])
    """
    axes, _ = resolve_axes(axis_name)
    count = axis_size(axes)
    sources = [-1] * count
    for source, destination in perm:
        if not (0 <= source < count and 0 <= destination < count):
            raise SpmdError(f"ppermute: perm must hold indices in 0..{count - 1} (got {(source, destination)}).")
        if sources[destination] >= 0 or source in sources:
            raise SpmdError(f"ppermute: a source or destination is there twice in perm={list(perm)}.")
        sources[destination] = source
    return _map("ppermute", lambda leaf: _ops.permute(varying(leaf, axes), sources, list(leaf.shape), axes), x)


def axis_index(axis_name: AxisName) -> Tensor:
    """This rank's index along `axis_name`, a 0-d int64 tensor; `jax.lax.axis_index`.

    Raises:
        SpmdError: an axis that is not bound.
    """
    return _ops.axis_index(resolve_axes(axis_name)[0])


def shard_offset(size: int, axis_name: AxisName) -> Tensor:
    """The start of this rank's chunk of a dim of length `size` sharded over `axis_name`, a 0-d int64 tensor.

    Chunks are those of a `DTensorSpec`: nested in the order of the axes, possibly uneven or empty.

    Raises:
        SpmdError: an axis that is not bound.
    """
    block = block_size()
    offset = _ops.shard_offset(size // block, resolve_axes(axis_name)[0])
    return offset if block == 1 else offset * block


def _reduce(name: str, op: str, x: Tree, axis_name: AxisName, number: Callable[[Any], Any]) -> Tree:
    axes, _ = resolve_axes(axis_name)

    def reduce(leaf: Any) -> Any:
        if isinstance(leaf, NUMBERS):
            return number(leaf)
        _check_tensor(name, leaf)
        if op == "sum" and leaf.dtype == torch.bool:
            leaf = leaf.to(torch.int64)
        if not axes:
            return leaf
        unreduced = op == "sum" and _is_unreduced(leaf, axes)
        if op == "sum" and leaf.is_floating_point():
            _refuse_second_sum(leaf, axes)
        reduced = _ops.all_reduce_unreduced if unreduced else _ops.all_reduce
        leaf = leaf if unreduced else varying(leaf, axes)
        return reduce_wide(leaf, op, lambda wide: reduced(wide, op, axes))

    return tree_map(reduce, x)  # type: ignore[arg-type, return-value]


def _refuse_second_sum(leaf: Tensor, axes: Sequence[str]) -> None:
    """SpmdError for a psum of an invariant gradient in a backward pass: as in code that was written without types."""
    function = summing_backward(leaf)
    for axis in axes if function is not None else ():
        if axis_type(leaf, axis) is AxisType.INVARIANT:
            raise SpmdError(
                f"psum over {axis!r} in {function}.backward of a gradient {TensorMeta.of(leaf)} that is invariant "
                f"along it: it is summed over the ranks already, and would become {axis_size(axis)} times too large. "
                f"Return spmd.collectives.pcast(x, {axis!r}) from {function}.forward, whose gradient is varying; or "
                "do without the function, as such casts are inserted."
            )


def refuse_groups(name: str, groups: Any) -> None:
    """SpmdError for `axis_index_groups`."""
    if groups is not None:
        raise SpmdError(
            f"{name}: axis_index_groups is not supported (got {groups!r}): a plan and its reports speak of mesh axes. "
            "Split the axis into two, as make_mesh({'node': 2, 'local': 4}), and name one of them."
        )


def _map(name: str, function: Callable[[Tensor], Tensor], x: Tree) -> Tree:
    def apply(leaf: Any) -> Tensor:
        _check_tensor(name, leaf)
        return function(leaf)

    return tree_map(apply, x)  # type: ignore[arg-type, return-value]


def _check_tensor(name: str, leaf: Any) -> None:
    if not isinstance(leaf, Tensor):
        raise SpmdError(f"{name}: every leaf of 'x' must be a tensor (got {type(leaf).__name__}).")


def _dim(name: str, argument: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise SpmdError(f"{name}: {argument!r} must lie in {-ndim}..{ndim - 1} (got {dim}).")
    return dim % ndim


def _check_split(name: str, leaf: Tensor, dim: int, count: int, tiled: bool) -> None:
    length = leaf.shape[dim]
    if tiled and length % count:
        raise SpmdError(
            f"{name}: dim {dim} of {list(leaf.shape)} must divide into {count} equal chunks. Pad it, or use "
            "psum_scatter with size=..."
        )
    if not tiled and length != count:
        raise SpmdError(
            f"{name}: dim {dim} of {list(leaf.shape)} must have the length {count}, the number of ranks. Pass "
            "tiled=True to cut it into chunks."
        )
