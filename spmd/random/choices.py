"""Draws of integers and of items, with `jax.random`'s names, arguments and algorithms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spmd.errors import SpmdError
from spmd.job.user_code import user_line
from spmd.random.generators.draw import DRAW
from spmd.random.keys import Key, broadcasts, shape_of, split, used
from spmd.random.samples import Shape, gumbel, uniform

_WORD = 0xFFFFFFFF


def randint(
    key: Key, shape: Shape, minval: int | Tensor, maxval: int | Tensor, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Uniform random integers in [minval, maxval); `jax.random.randint` of 32 bits.

    Args:
        key: a single key.
        shape: the shape of the result.
        minval, maxval: the ends, integers at most 2^32 apart, or tensors of them that broadcast to `shape`. Where
            `maxval` is not greater, results are `minval`.
        dtype: an integer dtype.

    Raises:
        SpmdError: no single key, no shape, ends that are too far apart or do not broadcast, or another dtype.

    >>> import spmd
    >>> randint(spmd.random.key(0), (5,), 0, 10)
    tensor([0, 3, 6, 0, 8])
    """
    sizes = shape_of(shape, "randint")
    if not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise SpmdError(f"dtype of spmd.random.randint at {user_line()} must be one of integers (got {dtype}).")
    low, high = (_end(end, sizes, name) for end, name in ((minval, "minval"), (maxval, "maxval")))
    if isinstance(low, int) and isinstance(high, int):
        limits = torch.iinfo(dtype)
        if high - low > 2**32 or low < limits.min or high > limits.max + 1:
            raise SpmdError(
                f"The ends of spmd.random.randint at {user_line()} must be at most 2^32 apart and fit in {dtype} (got "
                f"{low} and {high})."
            )
        span: Any = max(high - low, 1)
        multiplier: Any = pow(2**16 % span, 2) & _WORD
        multiplier %= span
    else:
        difference: Any = high - low
        span = difference.clamp(min=1)
        multiplier = ((2**16 % span) ** 2 & _WORD) % span
    used(key, "randint")
    higher, lower = (_words(each, sizes) for each in split(_unrecorded(key)))
    offset = ((higher % span) * multiplier + lower % span & _WORD) % span
    return (offset + low).to(dtype)


def permutation(key: Key, x: int | Tensor, axis: int = 0, independent: bool = False) -> Tensor:
    """A tensor with its items along a dim in random order; `jax.random.permutation`.

    Args:
        key: a single key.
        x: a tensor, or an integer for those below it.
        axis: the dim.
        independent: whether each line along the dim has an order of its own.

    Raises:
        SpmdError: no single key, no tensor or integer, or no such dim.

    >>> import spmd
    >>> permutation(spmd.random.key(0), 5)
    tensor([3, 0, 1, 2, 4])
    """
    if isinstance(x, int) and not isinstance(x, bool) and x >= 0:
        return _shuffled(key, (x,), 0, "permutation")
    if not isinstance(x, Tensor) or not -x.ndim <= axis < x.ndim:
        got = f"{tuple(x.shape)} and axis {axis}" if isinstance(x, Tensor) else f"{x!r:.60}"
        raise SpmdError(
            f"spmd.random.permutation at {user_line()} expects a count, or a tensor with the dim (got {got})."
        )
    axis %= x.ndim
    if independent:
        return x.gather(axis, _shuffled(key, tuple(x.shape), axis, "permutation"))
    return x.index_select(axis, _shuffled(key, (x.shape[axis],), 0, "permutation"))


def choice(
    key: Key, a: int | Tensor, shape: Shape = (), replace: bool = True, p: Tensor | None = None, axis: int = 0
) -> Tensor:
    """Random items of a tensor, or integers below a number; `jax.random.choice`.

    Args:
        key: a single key.
        a: a tensor, or an integer for those below it.
        shape: the shape of the choices, which takes the place of the dim.
        replace: whether an item may be chosen again.
        p: the probabilities of the items, or weights of the same proportions.
        axis: the dim of the items.

    Raises:
        SpmdError: no single key, no shape, no such dim, probabilities that do not fit, or too few items.

    >>> import spmd
    >>> choice(spmd.random.key(0), torch.tensor([10, 20, 30]), (4,))
    tensor([10, 20, 20, 20])
    """
    sizes = shape_of(shape, "choice")
    if isinstance(a, Tensor) and not -a.ndim <= axis < a.ndim:
        raise SpmdError(f"spmd.random.choice at {user_line()}: there is no dim {axis} in {tuple(a.shape)}.")
    axis = axis % a.ndim if isinstance(a, Tensor) else 0
    items, count = a.shape[axis] if isinstance(a, Tensor) else a, math.prod(sizes)
    if count and (items <= 0 or (not replace and count > items)):
        how = "" if replace else " without replacement"
        raise SpmdError(f"spmd.random.choice at {user_line()} cannot choose {count} of {items} items{how}.")
    if p is not None and tuple(p.shape) != (items,):
        raise SpmdError(f"p of spmd.random.choice at {user_line()} must have shape ({items},) (got {tuple(p.shape)}).")
    if p is None and replace:
        index = randint(key, (count,), 0, items)
    elif p is None:
        index = permutation(key, items)[:count]
    elif replace:
        sums = p.cumsum(0)
        index = torch.searchsorted(sums, sums[-1] * (1 - uniform(key, (count,), sums.dtype)))
    else:
        index = (gumbel(key, (items,), p.dtype) + p.log()).topk(count).indices
    if not isinstance(a, Tensor):
        return index.reshape(sizes)
    return a.index_select(axis, index).unflatten(axis, sizes) if sizes else a.index_select(axis, index).squeeze(axis)


def categorical(key: Key, logits: Tensor, axis: int = -1, shape: Shape | None = None, replace: bool = True) -> Tensor:
    """Random positions along a dim, of given log-probabilities; `jax.random.categorical`.

    Args:
        key: a single key.
        logits: floats; those along the dim need not be normalized.
        axis: the dim.
        shape: the shape of the result, which ends with that of `logits` without the dim; by default that shape.
        replace: whether positions of one distribution may be equal.

    Raises:
        SpmdError: no single key, no floats, no such dim, another shape, or too few positions.

    >>> import spmd
    >>> categorical(spmd.random.key(0), torch.tensor([0.1, 0.7, 0.2]).log(), shape=(6,))
    tensor([1, 1, 0, 1, 1, 1])
    """
    if not isinstance(logits, Tensor) or not logits.dtype.is_floating_point or not -logits.ndim <= axis < logits.ndim:
        got = (
            f"{logits.dtype} {tuple(logits.shape)} and axis {axis}" if isinstance(logits, Tensor) else f"{logits!r:.60}"
        )
        raise SpmdError(f"spmd.random.categorical at {user_line()} expects floats with the dim (got {got}).")
    axis = axis % logits.ndim - logits.ndim
    batch = tuple(size for dim, size in enumerate(logits.shape) if dim != axis + logits.ndim)
    sizes = batch if shape is None else shape_of(shape, "categorical")
    before = sizes[: len(sizes) - len(batch)]
    if sizes[len(before) :] != batch:
        raise SpmdError(
            f"shape of spmd.random.categorical at {user_line()} must end with {batch}, that of the distributions (got "
            f"{sizes})."
        )
    if replace:
        noise = gumbel(key, (*before, *logits.shape), logits.dtype)
        return (noise + logits).argmax(axis)
    count, positions = math.prod(before), logits.shape[axis]
    if count > positions:
        raise SpmdError(
            f"spmd.random.categorical at {user_line()} cannot choose {count} of {positions} positions without "
            "replacement."
        )
    chosen = (gumbel(key, tuple(logits.shape), logits.dtype) + logits).topk(count, dim=axis).indices
    return chosen.movedim(axis, 0).reshape(sizes)


def _end(end: int | Tensor, sizes: tuple[int, ...], name: str) -> int | Tensor:
    if isinstance(end, int):
        return end
    is_integer = isinstance(end, Tensor) and not (end.dtype.is_floating_point or end.dtype.is_complex)
    if not is_integer or not broadcasts(end, sizes):
        got = f"{end.dtype} {tuple(end.shape)}" if isinstance(end, Tensor) else f"{end!r:.60}"
        raise SpmdError(
            f"{name} of spmd.random.randint at {user_line()} must be an integer, or integers that broadcast to {sizes} "
            f"(got {got})."
        )
    return end.to(torch.int64)


def _words(key: Key, sizes: tuple[int, ...]) -> Tensor:
    """Random words of 32 bits, as int64."""
    return DRAW(key.data, sizes, "bits", torch.int32, key.impl).to(torch.int64) & _WORD  # type: ignore[no-any-return]


def _shuffled(key: Key, sizes: tuple[int, ...], axis: int, name: str) -> Tensor:
    """The numbers of items along a dim in random order, i64[sizes]: sorted by random words, as often as JAX does."""
    used(key, name)
    key = _unrecorded(key)
    shape = [-1 if dim == axis else 1 for dim in range(len(sizes))]
    items = torch.arange(sizes[axis], device=key.data.device).reshape(shape).expand(sizes)
    for _ in range(math.ceil(3 * math.log(max(1, math.prod(sizes))) / math.log(_WORD))):
        key, own = split(key)
        items = items.gather(axis, _words(own, sizes).sort(stable=True, dim=axis).indices)
    return items


def _unrecorded(key: Key) -> Key:
    """The key, for uses inside of a function that has used it."""
    return Key(key.data, key.impl)
