"""Calls of operators that take positions: a function of tensors and of positions along a dim of length `SIZE`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F

SIZE = 7
"""How many positions are valid: no mesh of the tests divides it."""


@attrs.frozen
class IndexCase:
    """A function of tensors with shapes `shapes`, and of positions of shape `index`.

    Args:
        function: takes the tensors, then the positions.
        shapes: of the tensors, of dtype float32.
        index: the shape of the positions.
        sizes: the number of valid positions.
        has_gradient: whether the gradient with respect to the tensors is taken too.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    index: tuple[int, ...]
    size: int = SIZE
    has_gradient: bool = True


_TABLE, _FEW, _ROWS = (SIZE, 4), (5, 4), (5,)


def _written(name: str, *options: Any, **more: Any) -> Callable[..., Any]:
    return lambda x, y, i: getattr(x, name)(0, i, y, *options, **more)


def _assigned(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[i] = y
    return x


CASES: dict[str, IndexCase] = {
    "embedding": IndexCase(lambda w, i: F.embedding(i, w), (_TABLE,), (3, 2)),
    "embedding, int32": IndexCase(lambda w, i: F.embedding(i.int(), w), (_TABLE,), (3, 2)),
    "embedding, padding": IndexCase(lambda w, i: F.embedding(i, w, padding_idx=1), (_TABLE,), (6,)),
    "embedding, max_norm": IndexCase(
        lambda w, i: F.embedding(i, w.clone(), max_norm=1.0), (_TABLE,), (6,), has_gradient=False
    ),
    "embedding_bag": IndexCase(lambda w, i: F.embedding_bag(i, w), (_TABLE,), (3, 2)),
    "embedding_bag, sum": IndexCase(lambda w, i: F.embedding_bag(i, w, mode="sum"), (_TABLE,), (3, 2)),
    "embedding_bag, max": IndexCase(lambda w, i: F.embedding_bag(i, w, mode="max"), (_TABLE,), (3, 2)),
    "gather": IndexCase(lambda x, i: x.gather(0, i), (_TABLE,), (5, 4)),
    "gather, dim 1": IndexCase(lambda x, i: x.gather(1, i), ((4, SIZE),), (4, 5)),
    "gather, line": IndexCase(lambda x, i: x.gather(-1, i), ((SIZE,),), (5,)),
    "gather, int32": IndexCase(lambda x, i: x.gather(0, i.int()), (_TABLE,), (5, 4)),
    "take_along_dim": IndexCase(lambda x, i: x.take_along_dim(i, 0), (_TABLE,), (5, 4)),
    "index_select": IndexCase(lambda x, i: x.index_select(0, i), (_TABLE,), _ROWS),
    "index_select, dim 1": IndexCase(lambda x, i: x.index_select(1, i), ((4, SIZE),), _ROWS),
    "index": IndexCase(lambda x, i: x[i], (_TABLE,), (3, 2)),
    "index, dim 1": IndexCase(lambda x, i: x[:, i], ((4, SIZE),), (3, 2)),
    "index, two": IndexCase(lambda x, i: x[i, i], ((SIZE, SIZE, 2),), _ROWS),
    "take": IndexCase(torch.take, (_TABLE,), (3, 2), 4 * SIZE),
    "put": IndexCase(lambda x, y, i: x.put(i, y), (_TABLE, _ROWS), _ROWS, 4 * SIZE, has_gradient=False),
    "put, accumulate": IndexCase(lambda x, y, i: x.put(i, y, accumulate=True), (_TABLE, _ROWS), _ROWS, 4 * SIZE),
    "assignment": IndexCase(_assigned, (_TABLE, (4,)), _ROWS),
    "index_put": IndexCase(lambda x, y, i: x.index_put((i,), y), (_TABLE, (4,)), _ROWS),
    "index_put, accumulate": IndexCase(lambda x, y, i: x.index_put((i,), y, accumulate=True), (_TABLE, _FEW), _ROWS),
    "index_add": IndexCase(_written("index_add"), (_TABLE, _FEW), _ROWS),
    "index_add, alpha": IndexCase(_written("index_add", alpha=-2.0), (_TABLE, _FEW), _ROWS),
    "index_copy": IndexCase(_written("index_copy"), (_TABLE, _FEW), _ROWS),
    "index_reduce": IndexCase(_written("index_reduce", "amax"), (_TABLE, _FEW), _ROWS, has_gradient=False),
    "index_fill": IndexCase(lambda x, i: x.index_fill(0, i, 2.0), (_TABLE,), _ROWS, has_gradient=False),
    "scatter": IndexCase(lambda x, y, i: x.scatter(0, i, y), (_TABLE, _FEW), (5, 4), has_gradient=False),
    "scatter, value": IndexCase(lambda x, i: x.scatter(0, i, 2.0), (_TABLE,), (5, 4)),
    "scatter_add": IndexCase(lambda x, y, i: x.scatter_add(0, i, y), (_TABLE, _FEW), (5, 4)),
    "scatter_reduce": IndexCase(lambda x, y, i: x.scatter_reduce(0, i, y, "amin"), (_TABLE, _FEW), (5, 4)),
    "scatter_reduce, mean": IndexCase(lambda x, y, i: x.scatter_reduce(0, i, y, "mean"), (_TABLE, _FEW), (5, 4)),
    "one_hot": IndexCase(lambda x, i: F.one_hot(i, SIZE) * x, ((SIZE,),), (3, 2)),
    "one_hot, number": IndexCase(lambda x, i: F.one_hot(i, SIZE) * x, ((SIZE,),), ()),
    "nll_loss": IndexCase(F.nll_loss, ((5, SIZE),), (5,)),
    "nll_loss, sum": IndexCase(lambda x, i: F.nll_loss(x, i, reduction="sum"), ((5, SIZE),), (5,)),
    "nll_loss, none": IndexCase(lambda x, i: F.nll_loss(x, i, reduction="none"), ((5, SIZE),), (5,)),
    "nll_loss, one": IndexCase(F.nll_loss, ((SIZE,),), ()),
    "nll_loss, weight": IndexCase(lambda x, w, i: F.nll_loss(x, i, w), ((5, SIZE), (SIZE,)), (5,), has_gradient=False),
    "nll_loss, ignored": IndexCase(lambda x, i: F.nll_loss(x, i, ignore_index=-1), ((5, SIZE),), (5,)),
    "nll_loss, image": IndexCase(F.nll_loss, ((2, SIZE, 3),), (2, 3)),
    "nll_loss, image, none": IndexCase(lambda x, i: F.nll_loss(x, i, reduction="none"), ((2, SIZE, 3, 2),), (2, 3, 2)),
    "cross_entropy": IndexCase(F.cross_entropy, ((5, SIZE),), (5,)),
    "cross_entropy, smooth": IndexCase(lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1), ((5, SIZE),), (5,)),
    "multi_margin_loss": IndexCase(F.multi_margin_loss, ((5, SIZE),), (5,)),
    "multilabel_margin_loss": IndexCase(F.multilabel_margin_loss, ((2, SIZE),), (2, SIZE)),
    "vmap, embedding": IndexCase(lambda w, i: torch.vmap(F.embedding, (0, None))(i, w), (_TABLE,), (3, 2)),
    "vmap, gather": IndexCase(torch.vmap(lambda x, i: x.gather(0, i)), ((4, SIZE),), (4, 3)),
    "vmap, one_hot": IndexCase(lambda x, i: torch.vmap(lambda i: F.one_hot(i, SIZE))(i) * x, ((SIZE,),), (3, 2)),
    "max_unpool1d": IndexCase(
        lambda x, i: F.max_unpool1d(x, i, 2, 2, 0, (SIZE,)), ((1, 4, 3),), (1, 4, 3), has_gradient=False
    ),
    "unused": IndexCase(lambda x, i: F.embedding(i, x).new_ones(2), (_TABLE,), (3, 2), has_gradient=False),
}


KINDS = ("right", "past", "large", "minus one", "negative")
"""All positions in range, or one of them just past the last, far past it, -1, or before the first."""


def positions(case: IndexCase, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Positions: all in range, or one of them as `kind` says."""
    count = math.prod(case.index)
    order = torch.randperm(case.size, generator=generator)  # without repetitions where that can be
    index = order.repeat(-(-count // case.size))[:count].reshape(case.index)
    wrong = {"past": case.size, "large": 9 * case.size, "minus one": -1, "negative": -case.size - 2}
    if kind in wrong:
        index.view(-1)[-1] = wrong[kind]
    return index
