"""Loops and branches in every place: DTensors, jit, disable_jit and shard_map, and torch's own names for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.func import grad, vmap

import spmd
from spmd import DTensor, P
from spmd.collectives import axis_index, psum
from spmd.core.pytree import tree_leaves

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
SPECS = (P(), P("data"), P(None, "model"), P(("model", "data")))
X, W = torch.randn(5, 3), torch.randn(3, 3)


def same(expected: Any, actual: Any) -> None:
    for one, other in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        torch.testing.assert_close(other.full_tensor() if isinstance(other, DTensor) else other, one)


def recurrent(x: Tensor, w: Tensor) -> Any:
    return spmd.scan(lambda h, row: ((y := torch.tanh(h @ w + row)), {"y": y, "n": h.sum()}), x.new_zeros(3), x)


def backward(x: Tensor, w: Tensor) -> Any:
    return grad(lambda x, w: recurrent(x, w)[1]["y"].square().sum(), (0, 1))(x, w)


def reversed_rows(x: Tensor, w: Tensor) -> Any:
    return spmd.scan(lambda c, row: (c + row["a"] @ w, (c, 1)), x[0], {"a": x}, reverse=True)


def powers(x: Tensor, w: Tensor) -> Any:
    return spmd.fori_loop(1, 4, lambda i, y: y @ w / i + x[i], x)


def mapped(x: Tensor, w: Tensor) -> Any:
    return spmd.map(lambda row: (row @ w).sum() * row, x)


def mapped_in_batches(x: Tensor, w: Tensor) -> Any:
    return spmd.map(lambda row: (row @ w).sum() * row, x, batch_size=2)


def products(x: Tensor, w: Tensor) -> Any:
    return spmd.associative_scan(torch.mul, x), spmd.associative_scan(torch.add, x @ w, reverse=True, dim=1)


def halved(x: Tensor, w: Tensor) -> Any:
    return spmd.while_loop(
        lambda s: s["x"].norm() > 0.1, lambda s: {"x": s["x"] / 2, "n": s["n"] + 1}, {"x": x, "n": 0}
    )


def chosen(x: Tensor, w: Tensor) -> Any:
    first = spmd.cond(x.sum() > w.sum(), lambda x: x.exp(), lambda x: x.sin(), x)
    return first, spmd.switch((x.sum() > 0).long(), [lambda: x @ w, lambda: x @ w.T])


def no_rows(x: Tensor, w: Tensor) -> Any:
    return spmd.scan(lambda c, row: (c + row.sum(), row @ w), 0, x[:0])


EVERYWHERE = (recurrent, backward, reversed_rows, powers, mapped, mapped_in_batches, products, no_rows)
ON_VALUES = (*EVERYWHERE, halved, chosen)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("function", ON_VALUES)
def test_dtensors(function: Callable[..., Any], spec: P) -> None:
    x, w = spmd.distribute(X, spec, MESH), spmd.distribute(W, P(None, "data"), MESH)
    result = function(x, w)
    same(function(X, W), result)
    assert function is no_rows or any(isinstance(leaf, DTensor) for leaf in tree_leaves(result))


@pytest.mark.parametrize("function", EVERYWHERE)
def test_jit(function: Callable[..., Any]) -> None:
    same(function(X, W), spmd.jit(function, (P("data"), P(None, "model")), mesh=MESH)(X, W))


@pytest.mark.parametrize("unroll", [2, 3, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_unrolled_in_jit(unroll: int, reverse: bool) -> None:
    def function(x: Tensor) -> Any:
        return spmd.scan(lambda c, row: (2 * c + row, c + row), x[0], x, reverse=reverse, unroll=unroll)

    same(function(X), spmd.jit(function, P("data"), mesh=MESH)(X))
    for rows in (X[:1], X[:4]):
        same(function(rows), spmd.jit(function, mesh=MESH)(rows))


@pytest.mark.parametrize("function", ON_VALUES)
def test_disable_jit(function: Callable[..., Any]) -> None:
    with spmd.disable_jit():
        same(function(X, W), spmd.jit(function, (P("data"), P(None, "model")), P(), mesh=MESH)(X, W))


def test_numbers_of_a_call_and_weak_numbers_in_jit() -> None:
    def function(x: Tensor, rate: float) -> Any:
        return spmd.scan(lambda c, row: ((c[0] + row, c[1] * 2), c[1]), (0, rate), x[:, 0])

    same(function(X, 0.5), spmd.jit(function, mesh=MESH)(X, 0.5))


def summed(x: Tensor) -> Any:
    carry, ys = spmd.scan(lambda c, row: (c + psum(row, "data"), psum(c * row, "data")), torch.zeros(2), x)
    return ys + carry


def counted(x: Tensor) -> Any:
    return spmd.while_loop(lambda s: psum(s, "data").abs().sum() < 99, lambda s: s * 2, x)


def told_apart(x: Tensor) -> Any:
    return spmd.cond(axis_index("data") == 0, lambda x: x * 2, lambda x: -x, x)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (summed, lambda a, b: (summed_by_hand(a, b),) * 2),
        (counted, lambda a, b: (counted_by_hand(a, b, 0), counted_by_hand(a, b, 1))),
        (told_apart, lambda a, b: (a * 2, -b)),
    ],
)
def test_bodies(function: Callable[..., Any], expected: Callable[..., Any]) -> None:
    x = torch.randn(4, 4)
    out = P() if function is summed else P(None, "data")
    mapped = spmd.shard_map(function, MESH, P(None, "data"), out)
    values = expected(*x.chunk(2, 1))
    whole = values[0] if function is summed else torch.cat(values, 1)
    with spmd.disable_jit():
        same(whole, mapped(x))
    same(whole, mapped(x))
    same(whole, spmd.jit(mapped, mesh=MESH)(x))


def test_ranks_of_a_body_may_not_part_where_they_communicate() -> None:
    function = lambda x: spmd.while_loop(lambda s: s.sum() < 3, lambda s: s + psum(s, "data"), x)  # noqa: E731
    with spmd.disable_jit(), pytest.raises(spmd.DivergenceError, match="Ranks run different collectives"):
        spmd.shard_map(function, MESH, P("data"), P("data"))(torch.tensor([1.0, 9.0]))


def summed_by_hand(a: Tensor, b: Tensor) -> Tensor:
    carry, ys = torch.zeros(2), []
    for one, other in zip(a, b, strict=True):
        ys.append(carry * (one + other))
        carry = carry + one + other
    return torch.stack(ys) + carry


def counted_by_hand(a: Tensor, b: Tensor, rank: int) -> Tensor:
    values = [a, b]
    while (values[0] + values[1]).abs().sum() < 99:
        values = [value * 2 for value in values]
    return values[rank]


def torch_cond(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def torch_while(x: Tensor) -> Any:
    return while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x * 2), (torch.tensor(0), x))


def torch_scan(x: Tensor) -> Any:
    return scan(lambda c, row: ({"a": c["a"] + row}, [c["a"] * row, row.sin()]), {"a": x[0]}, x, reverse=True)


def torch_scan_of_columns(x: Tensor) -> Any:
    return scan(lambda c, column: (c + column, c * column), x[:, 0], x, dim=1)


def torch_map(x: Tensor) -> Any:
    return map(lambda rows, y: {"a": rows[0] * 2, "b": rows[1].sum() + y}, (x, x.exp()), x[0])


def torch_associative_scan(x: Tensor) -> Any:
    return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")


OF_TORCH = (torch_cond, torch_while, torch_scan, torch_scan_of_columns, torch_map, torch_associative_scan)


def by_ours(function: Callable[..., Any]) -> Any:
    """The result, from functions of this package on plain tensors: torch compiles its own there."""
    if function is torch_cond:
        return spmd.cond(X.sum() > 0, torch.sin, torch.cos, X)
    if function is torch_while:
        return torch.tensor(3), X * 8
    if function is torch_scan:
        carry, ys = spmd.scan(lambda c, r: ({"a": c["a"] + r}, [c["a"] * r, r.sin()]), {"a": X[0]}, X, reverse=True)
        return carry, ys
    if function is torch_scan_of_columns:
        carry, ys = spmd.scan(lambda c, column: (c + column, c * column), X[:, 0], X.T)
        return carry, ys.T
    if function is torch_map:
        return {"a": X * 2, "b": X.exp().sum(1, keepdim=True) + X[0]}
    return X.cumsum(0)


@pytest.mark.parametrize("function", OF_TORCH)
def test_torchs_own_on_dtensors(function: Callable[..., Any]) -> None:
    x = spmd.distribute(X, P("data"), MESH)
    expected = by_ours(function)
    same(expected, function(x))
    if function is not torch_while:
        assert grad(lambda x: sum(y.sum() for y in tree_leaves(function(x))))(x).shape == x.shape


@pytest.mark.parametrize("function", [f for f in OF_TORCH if f not in (torch_cond, torch_while)])
def test_torchs_own_in_jit(function: Callable[..., Any]) -> None:
    same(by_ours(function), spmd.jit(function, P("data"), mesh=MESH)(X))


def test_batches_of_dtensors() -> None:
    x = spmd.distribute(X, P("data"), MESH)
    same(vmap(lambda row: halved(row, W)["x"])(X), vmap(lambda row: halved(row, W)["x"])(x))
    function = lambda row: spmd.cond(row.sum() > 0, lambda row: row * 2, torch.sin, row)  # noqa: E731
    same(vmap(function)(X), vmap(function)(x))


RETURNS_OPERANDS: dict[str, Callable[[Tensor], Any]] = {
    "scan": lambda x: spmd.scan(lambda c, r: (c, None), x, x[None])[0],
    "scan row": lambda x: spmd.scan(lambda c, r: (r, None), x[0], x)[0],
    "scan pair": lambda x: spmd.scan(lambda c, r: ((c[0], c[0]), None), (x * 1, x), x[None])[0],
    "no trip": lambda x: spmd.scan(lambda c, r: (c * 2, None), x, length=0)[0],
    "unrolled": lambda x: spmd.scan(lambda c, r: (c, None), x, length=2, unroll=True)[0],
    "fori": lambda x: spmd.fori_loop(0, 3, lambda i, c: c, x),
    "while": lambda x: spmd.while_loop(lambda c: c.sum() > 1e9, lambda c: c, x),
    "cond": lambda x: spmd.cond(x.sum() > 1e9, lambda x: -x, lambda x: x, x),
    "cond of a bool": lambda x: spmd.cond(False, lambda x: -x, lambda x: x, x),
    "cond expanded": lambda x: spmd.cond(x.sum() > 1e9, lambda x: -x, lambda x: x.sum(0).expand(2, 2), x),
    "bool expanded": lambda x: spmd.cond(False, lambda x: -x, lambda x: x.sum(0).expand(2, 2), x),
    "switch": lambda x: spmd.switch(0, [lambda x: x, lambda x: -x], x),
    "associative": lambda x: spmd.associative_scan(torch.add, x[:1]),
}


@pytest.mark.parametrize("call", RETURNS_OPERANDS)
def test_results_are_new_values(call: str) -> None:
    """Writing to what was an operand, or is another result, too; or to one of which rows are the same memory."""

    def written(x: Tensor) -> Any:
        results = RETURNS_OPERANDS[call](x)
        for result in results if isinstance(results, tuple) else (results,):
            result.mul_(2)
        return results, x + 0

    x = torch.arange(4.0).view(2, 2)
    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    inside = tree_leaves(spmd.jit(written, P("data"), mesh=mesh)(x))
    for found in (written(x.clone()), written(spmd.distribute(x, P("data"), mesh))):
        same(x, found[1])
        same([y.full_tensor() if isinstance(y, DTensor) else y for y in tree_leaves(found)], inside)
