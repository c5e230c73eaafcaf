"""Reading and writing by index tensors and masks, without writing in place."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operand, Operator


def _rows(d: Draw, ndim: tuple[int, int] = (1, 4)) -> Operand:
    return d.floats(ndim, nonempty=True)


def _getitem_tensor(d: Draw) -> str:
    x = d.anything((1, 4), nonempty=True)
    shape = d.choice((d.integer(1, 4),), (2, d.integer(1, 2)), (d.integer(1, 4),))
    return f"{x}[{d.index(shape, x.shape[0])}]"


def _getitem_later(d: Draw) -> str:
    x = _rows(d, (2, 4))
    index = d.index((d.integer(1, 4),), x.shape[1])
    return d.choice(f"{x}[:, {index}]", f"{x}[1:, {index}]", f"{x}[..., {d.index((2,), x.shape[-1])}]")


def _getitem_two(d: Draw) -> str:
    x = _rows(d, (2, 4))
    count = d.integer(1, 4)
    first, last = d.index((count,), x.shape[0]), d.index((count,), x.shape[-1])
    middle = ", ".join([":"] * (x.ndim - 2))
    return f"{x}[{first}, {middle + ', ' if middle else ''}{last}]"


def _getitem_list(d: Draw) -> str:
    x = _rows(d)
    return f"{x}[[{d.integer(0, x.shape[0] - 1)}, -1]]"


def _index_select(d: Draw) -> str:
    x = d.anything((1, 4), nonempty=True)
    dim = d.dim(x)
    return f"{x}.index_select({dim}, {d.index((d.integer(1, 4),), x.shape[dim])})"


def _gather(d: Draw) -> str:
    x = _rows(d, (1, 3))
    dim = d.dim(x)
    shape = list(x.shape)
    shape[dim] = d.integer(1, 3)
    return d.choice("torch.gather({}, {}, {})", "{}.gather({}, {})").format(x, dim, d.index(shape, x.shape[dim]))


def _take_along_dim(d: Draw) -> str:
    x = _rows(d, (1, 3))
    dim = d.dim(x)
    d.distinct(x, dim)
    return f"torch.take_along_dim({x}, {x}.argsort({dim}), {dim})"


def _take(d: Draw) -> str:
    x = _rows(d)
    return f"torch.take({x}, {d.index((d.integer(1, 4),), x.numel)})"


def _put(d: Draw) -> str:
    x = _rows(d)
    count = d.integer(1, min(3, x.numel))
    index = d.index((count,), x.numel, distinct=True)
    return f"torch.put({x}, {index}, {d.sized((count,))}, accumulate={d.maybe()})"


def _source(d: Draw, x: Operand, dim: int, count: int) -> Operand:
    shape = list(x.shape)
    shape[dim] = count
    return d.sized(shape)


def _index_add(d: Draw) -> str:
    x = _rows(d)
    dim, count = d.dim(x), d.integer(1, 4)
    index, source = d.index((count,), x.shape[dim]), _source(d, x, dim, count)
    return f"{x}.index_add({dim}, {index}, {source}, alpha={d.choice('1', '0.5')})"


def _index_copy(d: Draw) -> str:
    x = _rows(d)
    dim = d.dim(x)
    count = d.integer(1, x.shape[dim])
    return f"{x}.index_copy({dim}, {d.index((count,), x.shape[dim], distinct=True)}, {_source(d, x, dim, count)})"


def _index_fill(d: Draw) -> str:
    x = _rows(d)
    dim = d.dim(x)
    return f"{x}.index_fill({dim}, {d.index((d.integer(1, 3),), x.shape[dim])}, {d.number()})"


def _index_reduce(d: Draw) -> str:
    x = _rows(d)
    dim, count = d.dim(x), d.integer(1, 4)
    how = d.choice("amax", "amin", "mean", "prod")
    return (
        f"torch.index_reduce({x}, {dim}, {d.index((count,), x.shape[dim])}, {_source(d, x, dim, count)} + 0.1, '{how}')"
    )


def _index_put(d: Draw) -> str:
    x = _rows(d)
    count = d.integer(1, 3)
    value = d.sized((count, *x.shape[1:]))
    return f"torch.index_put({x}, ({d.index((count,), x.shape[0])},), {value}, accumulate=True)"


def _scattered(d: Draw) -> tuple[Operand, int, str, Operand]:
    x = _rows(d, (1, 3))
    dim = d.dim(x)
    shape = list(x.shape)
    shape[dim] = d.integer(1, 3)
    return x, dim, d.index(shape, x.shape[dim]), d.sized(shape)


def _scatter(d: Draw) -> str:
    x = _rows(d, (1, 3))
    dim = d.dim(x)
    d.distinct(x, dim)
    return f"torch.scatter({x}, {dim}, {x}.argsort({dim}), {d.like(x)})"


def _scatter_value(d: Draw) -> str:
    x, dim, index, _ = _scattered(d)
    return f"{x}.scatter({dim}, {index}, {d.number()})"


def _scatter_add(d: Draw) -> str:
    x, dim, index, source = _scattered(d)
    return f"{x}.scatter_add({dim}, {index}, {source})"


def _scatter_reduce(d: Draw) -> str:
    x, dim, index, source = _scattered(d)
    how = d.choice("sum", "prod", "mean", "amax", "amin")
    return f"{x}.scatter_reduce({dim}, {index}, {source} + 0.1, '{how}', include_self={d.maybe()})"


def _select_scatter(d: Draw) -> str:
    x = _rows(d)
    dim = d.dim(x)
    rest = [size for n, size in enumerate(x.shape) if n != dim % x.ndim]
    return f"torch.select_scatter({x}, {d.sized(rest)}, {dim}, {d.integer(-x.shape[dim], x.shape[dim] - 1)})"


def _slice_scatter(d: Draw) -> str:
    x = _rows(d)
    dim = d.dim(x)
    start = d.integer(0, x.shape[dim] - 1)
    step = d.integer(1, 2)
    source = _source(d, x, dim, -(-(x.shape[dim] - start) // step))
    return f"torch.slice_scatter({x}, {source}, {dim}, {start}, None, {step})"


def _diagonal_scatter(d: Draw) -> str:
    x = _rows(d, (2, 2))
    return f"torch.diagonal_scatter({x}, {d.sized((min(x.shape),))})"


def _masked_scatter(d: Draw) -> str:
    x = _rows(d, (1, 3))
    return f"{x}.masked_scatter({x} > 0.2, {d.like(x)})"


def _embedding(d: Draw) -> str:
    table = d.floats(2, nonempty=True)
    index = d.index(d.choice((d.integer(1, 4),), (2, d.integer(1, 3))), table.shape[0])
    return f"F.embedding({index}, {table}{d.choice('', ', padding_idx=0')})"


def _embedding_bag(d: Draw) -> str:
    table = d.floats(2, nonempty=True)
    mode = d.choice("sum", "mean", "max")
    return f"F.embedding_bag({d.index((d.integer(1, 3), d.integer(1, 3)), table.shape[0])}, {table}, mode='{mode}')"


def _one_hot(d: Draw) -> str:
    return f"F.one_hot({d.index((d.integer(1, 4),), 4)}, 4)"


def _bucketize(d: Draw) -> str:
    return f"torch.bucketize({d.floats((0, 3))}, torch.tensor([-1.0, -0.2, 0.4, 1.1]), right={d.maybe()})"


def _searchsorted(d: Draw) -> str:
    x = d.floats(1, nonempty=True)
    d.distinct(x, 0)
    return f"torch.searchsorted({x}.sort().values, {d.floats((1, 3))} + 0.05)"


def _where_index(d: Draw) -> str:
    x = _rows(d, (1, 3))
    return f"torch.where(torch.arange({x.shape[-1]}) % 2 == 0, {x}, {d.broadcast(x)})"


def _int_gather(d: Draw) -> str:
    x = d.ints((1, 3), nonempty=True)
    dim = d.dim(x)
    return f"{x}.gather({dim}, {x} % {x.shape[dim]})"


def _tril_indices(d: Draw) -> str:
    x = d.floats((2, 3), where=lambda t: t.shape[0] > 1 and t.shape[1] > 1 and t.numel() > 0)
    rows, columns = x.shape[:2]
    return f"{x}[tuple(torch.tril_indices({rows}, {columns}))]"


OPERATORS: Mapping[str, Operator] = {
    "getitem_tensor": _getitem_tensor,
    "getitem_later": _getitem_later,
    "getitem_two": _getitem_two,
    "getitem_list": _getitem_list,
    "index_select": _index_select,
    "gather": _gather,
    "take_along_dim": _take_along_dim,
    "take": _take,
    "put": _put,
    "index_add": _index_add,
    "index_copy": _index_copy,
    "index_fill": _index_fill,
    "index_reduce": _index_reduce,
    "index_put": _index_put,
    "scatter": _scatter,
    "scatter_value": _scatter_value,
    "scatter_add": _scatter_add,
    "scatter_reduce": _scatter_reduce,
    "select_scatter": _select_scatter,
    "slice_scatter": _slice_scatter,
    "diagonal_scatter": _diagonal_scatter,
    "masked_scatter": _masked_scatter,
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
    "one_hot": _one_hot,
    "bucketize": _bucketize,
    "searchsorted": _searchsorted,
    "where_index": _where_index,
    "int_gather": _int_gather,
    "tril_indices": _tril_indices,
}
