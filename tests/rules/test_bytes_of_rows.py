"""Reads and writes of rows, windows and merges along a sharded dim: values, gradients, and what they send."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sampling import product

import spmd
from spmd import P

ROW = 1024
"""Items of a row."""

ROWS = 4096

BYTES_COUNT = spmd.Machine(link_bandwidth=1.0, latency=0.0)
"""A machine on which bytes alone decide: small tensors are not gathered."""

Function = Callable[[torch.Tensor], torch.Tensor]

POSITIONS = torch.tensor([1, 60, -3])

FUNCTIONS: dict[str, tuple[Function, int]] = {
    "select": (lambda x: x[40], 1),
    "last": (lambda x: x[-1], 1),
    "few rows": (lambda x: x[2:5], 3),
    "positions": (lambda x: x[POSITIONS], 3),
    "write a row": (lambda x: torch.select_scatter(x, x.new_ones(x.shape[1]), 0, 7), 0),
    "write positions": (lambda x: x.index_put((POSITIONS,), x.new_ones(3, 1)), 0),
    "add to positions": (lambda x: x.index_add(0, POSITIONS % 9, x.new_ones(3, x.shape[1])), 0),
    "scatter_add": (lambda x: x.scatter_add(0, torch.full((1, x.shape[1]), 5), x.new_ones(1, x.shape[1])), 0),
    "diagonal": (lambda x: x.diagonal(-3), 1),
    "trace": (lambda x: x[: x.shape[1]].trace(), 1),
    "sharded diagonal": (lambda x: x[: x.shape[1]].diagonal(1).sin().diag_embed(-1), 1),
    "write a diagonal": (lambda x: torch.diagonal_scatter(x, x.new_ones(min(x.shape))), 0),
    "roll": (lambda x: x.roll(1, 0), 1),
    "roll back": (lambda x: x.roll((-2, 3), (0, 1)), 2),
    "diff": (lambda x: x[1:] - x[:-1], 1),
    "shift by pad": (lambda x: F.pad(x, (0, 0, 1, -1)), 1),
    "every second": (lambda x: x[::2], 0),
    "flip": (lambda x: x.flip(0), ROWS // 16),
    "every third": (lambda x: x[5:-7:3], 5),
    "join what is shifted": (lambda x: torch.cat([x[1:], x[:1]]), 1),
    "halves in the other order": (lambda x: torch.cat(x.tensor_split(2)[::-1]), ROWS // 8),
    "pieces in the other order": (lambda x: torch.cat(x.split(x.shape[0] // 3)[::-1]), ROWS // 8),
    "one piece": (lambda x: x.split(x.shape[0])[0], 0),
    "circular": (lambda x: torch.cat([x[-1:], x, x[:1]])[:-2], 8),
    "norm": (lambda x: x.norm(), 1),
    "norm 3": (lambda x: torch.linalg.vector_norm(x, 3, dim=0), 1),
    "normalize": (lambda x: F.normalize(x, dim=0), 1),
    "topk": (lambda x: x.topk(2, 0)[0], 6),
    "topk of all": (lambda x: x.flatten().topk(2)[0], 1),
    "items of all": (lambda x: x.flatten()[POSITIONS], 1),
    "histc": (lambda x: x.histc(10), 1),
    "kthvalue": (lambda x: x.kthvalue(2, 0)[0], 6),
    "prod": (lambda x: (1 + x / x.shape[0]).prod(0), 4),
}
"""By name, a function of a matrix with sharded rows, and how many rows a rank has to send at most."""


def _sharded(function: Function, **axes: int) -> Callable[..., torch.Tensor]:
    mesh = spmd.make_mesh(axes, runtime="virtual")
    return spmd.jit(function, (P(tuple(axes)),), None, mesh=mesh)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_are_sent_and_not_shards(name: str) -> None:
    function, rows = FUNCTIONS[name]
    sent = sum(comm.bytes for comm in _sharded(function, x=8).plan(torch.empty(ROWS, ROW, device="meta")).comms)
    assert 2 * rows * ROW * 4 >= sent


@pytest.mark.parametrize("name", ["every second", "every third", "diff"])
def test_gradients_of_slices_send_rows(name: str) -> None:
    function, _ = FUNCTIONS[name]
    gradient = _sharded(torch.func.grad(lambda x: (function(x) ** 2).sum()), x=8)
    sent = sum(comm.bytes for comm in gradient.plan(torch.empty(ROWS, ROW, device="meta")).comms)
    assert 16 * ROW * 4 >= sent


@pytest.mark.parametrize(("name", "axes"), product(FUNCTIONS, [{"x": 2}, {"x": 3}, {"x": 8}, {"x": 2, "y": 2}]))
def test_values_and_gradients_are_those_of_one_device(name: str, axes: dict[str, int]) -> None:
    function, _ = FUNCTIONS[name]

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: (function(x) ** 2).sum())(x)

    torch.manual_seed(0)
    for rows in (61, 64):  # 61 rows are uneven on any mesh
        x = torch.randn(rows, 4, dtype=torch.float64)
        for each in (function, gradient):
            mesh = spmd.make_mesh(axes, runtime="virtual")
            step = spmd.jit(each, (P(tuple(axes)),), None, mesh=mesh, machine=BYTES_COUNT)
            torch.testing.assert_close(step(x).full_tensor(), each(x))


PLANE: dict[str, tuple[Function, int]] = {
    "roll": (lambda x: x.roll((1, -2), (0, 1)), 3),
    "pad": (lambda x: F.pad(x, (1, -1, -2, 2)), 3),
    "shift one": (lambda x: x.roll(1, 1), 1),
    "flip": (lambda x: x.flip(0, 1), ROWS // 3 + 2),
}
"""By name, a function of a matrix with sharded rows and columns, and how many lines a rank has to send at most."""


@pytest.mark.parametrize("name", PLANE)
def test_borders_along_two_dims_are_sent_over_two_axes(name: str) -> None:
    function, lines = PLANE[name]

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: (function(x) ** 3).sum())(x)

    mesh = spmd.make_mesh({"x": 2, "y": 3}, runtime="virtual")
    for spec in (P("x", "y"), P("y", "x")):
        plan = spmd.jit(function, (spec,), spec, mesh=mesh).plan(torch.empty(ROWS, ROWS, device="meta"))
        assert lines * ROWS * 4 >= sum(comm.bytes for comm in plan.comms)
        for shape in ((12, 18), (13, 17), (2, 5)):
            x = torch.randn(shape, dtype=torch.float64)
            for each in (function, gradient):
                torch.testing.assert_close(spmd.jit(each, (spec,), spec, mesh=mesh)(x).full_tensor(), each(x))


@pytest.mark.parametrize("cut", [P("x"), P(None, "x")], ids=["rows", "columns"])
@pytest.mark.parametrize("offset", [0, -1, 2])
def test_sharded_diagonals_are_not_gathered(cut: P, offset: int) -> None:
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual")
    read = spmd.jit(lambda x: x.diagonal(offset), (cut,), P("x"), mesh=mesh, machine=BYTES_COUNT)
    write = spmd.jit(lambda x: torch.diag(x, offset), (P("x"),), cut, mesh=mesh, machine=BYTES_COUNT)
    for size in (3, 16, 61):
        x = torch.randn(size, size, dtype=torch.float64)
        torch.testing.assert_close(read(x).full_tensor(), x.diagonal(offset))
        torch.testing.assert_close(write(x[0]).full_tensor(), x[0].diag(offset))
    for each, operand in ((read, x), (write, x[0])):
        assert 8 * abs(offset) * 4 >= sum(comm.bytes for comm in each.plan(operand).comms)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_empty_shards_take_part(rows: int) -> None:
    x = torch.randn(rows, 3, dtype=torch.float64)
    functions: tuple[Function, ...] = (
        lambda x: x[-1],
        lambda x: x.roll(1, 0),
        lambda x: x.norm(),
        lambda x: torch.cat([x, x[:1]]),
        lambda x: x.topk(1, 0)[1],
        lambda x: x.kthvalue(1, 0, keepdim=True)[1],
        lambda x: x.flatten().topk(3)[1],
        lambda x: x.flatten().argmin(0),
    )
    for function in functions:
        step = spmd.jit(function, (P("x"),), P(), mesh=spmd.make_mesh({"x": 4}, runtime="virtual"))
        torch.testing.assert_close(step(x).full_tensor(), function(x))


def test_negative_zeros_and_booleans_are_kept() -> None:
    mesh = spmd.make_mesh({"x": 3}, runtime="virtual")
    x = torch.full((7, 2), -0.0)
    for function in (lambda x: x[5], lambda x: x[torch.tensor([5])], lambda x: x[1:3]):
        assert spmd.jit(function, (P("x"),), P(), mesh=mesh)(x).full_tensor().signbit().all()
        flags = torch.arange(14).reshape(7, 2) % 3 == 0
        assert torch.equal(function(flags), spmd.jit(function, (P("x"),), P(), mesh=mesh)(flags).full_tensor())


def test_an_eager_row_of_a_sharded_tensor_is_sent_as_a_row() -> None:
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual")
    x = spmd.distribute(torch.randn(4096, 256), P("x"), mesh)
    with spmd.comms_of() as comms:
        row = x[40]
    torch.testing.assert_close(row.full_tensor(), x.full_tensor()[40])
    assert 2 * 256 * 4 >= comms.bytes > 0


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("keys", [1, 5, 16])
def test_keys_are_attended_to_where_they_are(axes: dict[str, int], keys: int) -> None:
    """Also where some ranks hold no key, or none that a mask leaves to a query."""
    mesh, cut = spmd.make_mesh(axes, runtime="virtual"), P(None, None, tuple(axes))
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, length, 8, dtype=torch.float64) for length in (3, keys, keys))
    excluded = torch.arange(keys) < torch.tensor([[0], [keys // 2], [keys]])
    masks = None, torch.zeros(3, keys, dtype=torch.float64).masked_fill(excluded, -torch.inf), ~excluded

    def gradients(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> object:
        return torch.func.grad(lambda tensors: attend(*tensors, mask).square().sum())((query, key, value))

    for mask in masks:
        specs = (P(), cut, cut, None if mask is None else P(None, tuple(axes)))
        found = spmd.jit(attend, specs, P(), mesh=mesh)(query, key, value, mask)
        torch.testing.assert_close(found.full_tensor(), attend(query, key, value, mask))
        found = spmd.full_tree(spmd.jit(gradients, specs, (P(), cut, cut), mesh=mesh)(query, key, value, mask))
        torch.testing.assert_close(found, gradients(query, key, value, mask))


def test_decoding_sends_results_and_not_the_cache() -> None:
    query, cache = (torch.empty(1, 32, length, 128, device="meta") for length in (1, 131_072))
    mesh, cut = spmd.make_mesh({"x": 8}, runtime="virtual"), P(None, None, "x")
    plan = spmd.jit(attend, (P(), cut, cut, None), P(), mesh=mesh).plan(query, cache, cache, None)
    assert 1.5e6 / 32 >= sum(comm.bytes for comm in plan.comms)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_bins_over_values_that_are_not_finite_are_refused(value: float) -> None:
    x = torch.ones(4096)
    x[7] = value
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual")
    with pytest.raises(RuntimeError, match="is not finite"):
        spmd.jit(lambda x: x.histc(5), (P("x"),), None, mesh=mesh, machine=BYTES_COUNT)(x)
