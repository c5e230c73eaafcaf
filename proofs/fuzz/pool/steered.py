"""Operators on values with sharding constraints that make the operator hard to shard, so that a defect shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from proofs.fuzz.pool.matmul import distances
from proofs.fuzz.pool.operator import Draw, Operand, Operator
from spmd.core.spec import P

_Place = Callable[[object, P], str]
"""From the text of a value and a spec, the text of the value constrained to that spec."""


def _steered(build: Callable[[_Place], str]) -> str:
    """An expression in which `build` constrains values; on one device it copies them, as `constrain` does."""
    return _either(build(_constrained), build(lambda text, spec: f"({text}).clone()"))


def _either(traced: str, plain: str) -> str:
    return f"({traced} if is_tracing() else {plain})"


def _constrained(text: object, spec: P) -> str:
    return f"spmd.constrain({text}, {spec!r})"


def _over(axis: str | tuple[str, ...], dim: int = 0) -> P:
    """The spec that shards one dim over the axis or axes."""
    return P(*[None] * dim, axis)


def _sum(axis: str) -> P:
    return P(partial={axis: "sum"})


def _sizes(d: Draw, ndim: int, low: int = 2) -> Operand:
    """A float tensor whose dims all have at least length `low`."""
    return d.floats(
        ndim, where=lambda t: min(t.shape) >= low, make=lambda: [d.integer(low, 5) for _ in range(ndim)], fresh=0.15
    )


def _square(d: Draw) -> Operand:
    size = d.integer(2, 5)
    return d.floats(2, where=lambda t: t.shape[0] == t.shape[1] > 1, make=lambda: (size, size), fresh=0.15)


def _shards_of_square(text: str) -> Operator:
    """An operator of a square matrix, `x` in the text; the operand and the result are sharded along the same dim."""

    def operator(d: Draw) -> str:
        x, spec = _square(d), _over(d.axis(), d.integer(0, 1))
        return _steered(lambda at: at(text.format(x=at(x, spec)), spec))

    return operator


def _shards(text: str) -> Operator:
    """An operator along dim 0, with `x` in the text; the operand and the result are sharded along that dim."""

    def operator(d: Draw) -> str:
        x, spec = _sizes(d, d.integer(1, 2)), P(d.axis())
        d.distinct(x, 0)
        return _steered(lambda at: at(text.format(x=at(x, spec)), spec))

    return operator


def _amax_of_few(d: Draw) -> str:
    """The maximum of negative numbers, with empty shards on some ranks."""
    x, axis, count = _sizes(d, 2), d.axis(), d.integer(1, 3)
    few = f"(-{x}[:{count}].abs() - 0.2)"
    return _steered(lambda at: at(f"{at(few, P(axis))}.amax(0)", P(partial={axis: "max"})))


def _all_of_parts(d: Draw) -> str:
    """`all`, where only the second rank holds a false element."""
    x, axis = _sizes(d, d.integer(1, 3)), d.axis()
    parts = f"torch.stack([{x} == {x}, {x} > {d.number()}, {x} == {x}])"
    return _steered(lambda at: at(f"{at(parts, P(axis))}.all(0)", P()))


def _extremes_of_many(d: Draw) -> str:
    """Extremes of columns so long that ranks exchange their local results, and not the columns."""
    x, axis = d.sized((d.integer(1, 3),)), d.axis()
    column = f"({x}.sum() + torch.arange(600) * 1.7).sin().view(300, 2)"
    text = d.choice("{}.argmax(0)", "{}.argmin(0)", "{}.max(0)", "{}.min(0)")
    return _steered(lambda at: text.format(at(column, P(axis))))


def _cdist(d: Draw) -> str:
    x, axis, p = _sizes(d, 2), d.axis(), d.choice("2.0", "3.0")
    y, spec = d.sized((None, x.shape[1])), _over(axis, 1)
    distance = f"torch.cdist({_constrained(x, spec)}, {_constrained(f'{y} + 3', spec)}, p={p}) * 1"
    return _either(_constrained(distance, _sum(axis)), distances(x, f"({y} + 3)", p))


def _bilinear(d: Draw) -> str:
    """A bilinear product with its summed dim sharded, so that each rank has some of the terms."""
    x, axis = _sizes(d, 2), d.axis()
    y = d.sized((x.shape[0], None))
    weight = d.sized((None, x.shape[1], y.shape[1]))
    return _steered(lambda at: at(f"F.bilinear({at(x, _over(axis, 1))}, {y}, {weight})", _sum(axis)))


def _causal_attention(d: Draw) -> str:
    batch, heads, rows, width = d.integer(1, 2), d.integer(1, 2), d.integer(2, 5), d.integer(1, 3)
    q, k, v = (d.sized((batch, heads, rows, width)) for _ in range(3))
    spec = _over(d.axis(), 2)
    return _steered(
        lambda at: at(f"F.scaled_dot_product_attention({at(q, spec)}, {k}, {v}, is_causal=True)", spec),
    )


def _embedding(d: Draw) -> str:
    table, axis = _sizes(d, 2), d.axis()
    index = d.index((d.integer(2, 4),), table.shape[0])
    return _steered(lambda at: at(f"F.embedding({index}, {at(table, P(axis))})", _sum(axis)))


def _nll_gradient(d: Draw) -> str:
    x, spec = _sizes(d, 2), _over(d.axis(), 1)
    loss = f"lambda a: F.nll_loss(a, {d.index((x.shape[0],), x.shape[1])}, reduction='{d.choice('sum', 'mean')}')"
    return _steered(lambda at: at(f"torch.func.grad({loss})({at(x, spec)})", spec) + f" * {x}")


def _index_add(d: Draw) -> str:
    x, axis = _sizes(d, d.integer(1, 2)), d.axis()
    count = d.integer(2, 4)
    index, source = d.index((count,), x.shape[0]), d.sized((count, *x.shape[1:]))
    text = d.choice("{x}.index_add(0, {i}, {s})", "torch.index_put({x}, ({i},), {s}, accumulate=True)")
    return _steered(lambda at: at(text.format(x=x, i=index, s=at(source, P(axis))), _sum(axis)))


def _searchsorted(d: Draw) -> str:
    x, axis = _sizes(d, 1), d.axis()
    d.distinct(x, 0)
    values = f"{d.floats((1, 2))} + 0.05"
    return _steered(lambda at: f"torch.searchsorted({at(f'{x}.sort().values', P(axis))}, {values})")


def _joined(d: Draw) -> str:
    """A flatten of two dims, the first of which is sharded before and after."""
    x, axis = _sizes(d, d.integer(2, 3)), d.axis()
    return _steered(lambda at: at(f"{at(x, P(axis))}.flatten(0, 1).neg()", P(axis)))


def _minor_factor(d: Draw) -> str:
    """A flatten of two dims, one of which is sharded, then a reduction of another dim and a gather."""
    x, spec = _sizes(d, 3), _over(d.axis(), d.integer(0, 1))
    return _steered(lambda at: at(f"{at(x, spec)}.flatten(0, 1).amax(-1)", P()))


def _disagreeing_views(d: Draw) -> str:
    """Two views whose dims have no common factors."""
    x, axis = _sizes(d, 2), d.axis()
    rows, columns = x.shape
    return _steered(
        lambda at: at(f"{at(f'{at(x, P(axis))}.flatten().sin()', P())}.view({columns}, {rows}).cos()", P(axis))
    )


def _views_of_shards(d: Draw) -> str:
    x, axis = _sizes(d, 2), d.axis()
    rows, columns = x.shape
    return _steered(lambda at: f"(lambda t: t.view({columns}, {rows}) + t.sum())({at(x, P(axis))}.flatten().sin())")


def _two_reductions(d: Draw) -> str:
    """The sum of a partial sum and of a maximum that is partial on another axis, of which only one row is read."""
    x = _sizes(d, 2)
    first, second = d.two_axes()
    left = f"torch.stack([{x}, {d.like(x)}])"
    right = f"torch.stack([{d.like(x)}, {x}])"
    return _steered(
        lambda at: f"({at(left, P(first))}.sum(0) + {at(right, P(second))}.amax(0))[:1]",
    )


def _convolution(d: Draw) -> str:
    """A convolution with both dims of the images sharded."""
    x = d.sized((d.integer(1, 2), d.integer(1, 2), d.integer(3, 5), d.integer(3, 5)))
    weight = d.sized((d.integer(1, 2), x.shape[1], d.integer(2, 3), d.integer(2, 3)))
    spec = P(None, None, *d.two_axes())
    return _steered(lambda at: at(f"F.conv2d({at(x, spec)}, {weight}, padding=1)", spec))


def _exchange(d: Draw) -> str:
    """An all_to_all of uneven shards, in which a group of ranks with fewer rows sends more of them."""
    x = d.sized((d.integer(2, 4),))
    minor, major = sorted(d.two_axes(), key=lambda axis: -d.mesh[d.axes.index(axis)])
    rows, columns = {3: (13, 2), 4: (25, 3)}.get(d.mesh[d.axes.index(minor)], (5, 2))
    value = f"({x}.repeat({rows * columns})[:{rows * columns}].view({rows}, {columns}) * torch.arange({columns}))"
    return _steered(lambda at: at(at(value, P((major, minor))), P(major, minor)))


def _gathered_at_once(d: Draw) -> str:
    """Uneven shards over two axes, of a dim whose leading factor the axes do not divide."""
    x = d.sized((d.integer(1, 3),))
    axes = d.two_axes()
    ranks = math.prod(d.mesh[d.axes.index(axis)] for axis in axes)
    rows, columns = {4: (3, 3), 6: (5, 3)}.get(ranks, (5, 5))
    value = f"{x}.repeat({rows * columns})[:{rows * columns}].view({rows}, {columns}).sin().flatten()"
    return _steered(lambda at: f"{at(value, P(axes))}.view({rows}, {columns}).cos()")


def _list(d: Draw) -> str:
    """A list operator with a partial result, and another result for which an operand is resharded."""
    x, y, axis = _sizes(d, d.integer(1, 2)), _sizes(d, 2), d.axis()
    first, second = (f"torch.stack([{a}, {b}])" for a, b in ((x, d.like(x)), (d.like(x), x)))
    z = d.like(y)

    def build(at: _Place) -> str:
        pending = [at(f"{at(stacked, P(axis))}.sum(0)", _sum(axis)) for stacked in (first, second)]
        sharded = [at(y, P(axis)), at(z, _over(axis, 1))]
        return f"torch._foreach_add([{pending[0]}, {sharded[0]}], [{pending[1]}, {sharded[1]}])"

    return _steered(build)


def _sharded_late(d: Draw) -> str:
    """An operator of few rows that are sharded just before it; some ranks have none."""
    x, axis, count = _sizes(d, 2), d.axis(), d.integer(1, 2)
    y = d.sized((x.shape[1], d.integer(2, 3)))
    text = d.choice("({x} @ {y})", "torch.fft.fft({x}).real", "{x}.amax(1)")
    few = lambda at: at(at(f"{x}[:{count}].sin()", P()), P(axis))  # noqa: E731
    return _steered(lambda at: at(text.format(x=few(at), y=y), P(axis)))


OF_TWO_AXES: Mapping[str, Operator] = {
    "two_reductions": _two_reductions,
    "shards_of_images": _convolution,
    "uneven_exchange": _exchange,
    "gathered_at_once": _gathered_at_once,
}
"""The operators that need two mesh axes with more than one rank."""

OPERATORS: Mapping[str, Operator] = {
    **OF_TWO_AXES,
    "shards_transposed": _shards_of_square("{x}.t().neg()"),
    "shards_matrix_exp": _shards_of_square("torch.linalg.matrix_exp({x} * 0.1)"),
    "shards_sorted": _shards("{x}.sort(0).values"),
    "shards_moved": _shards("{x}.roll(1, 0).flip(0)"),
    "shards_cummax": _shards("{x}.cummax(0).values"),
    "amax_of_few": _amax_of_few,
    "all_of_parts": _all_of_parts,
    "extremes_of_many": _extremes_of_many,
    "shards_cdist": _cdist,
    "shards_of_terms": _bilinear,
    "shards_of_queries": _causal_attention,
    "shards_of_table": _embedding,
    "shards_of_classes": _nll_gradient,
    "shards_added": _index_add,
    "shards_searched": _searchsorted,
    "shards_joined": _joined,
    "minor_factor": _minor_factor,
    "disagreeing_views": _disagreeing_views,
    "views_of_shards": _views_of_shards,
    "list_of_reductions": _list,
    "sharded_late": _sharded_late,
}
