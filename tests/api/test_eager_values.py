"""Operators outside of `spmd.jit` whose results depend on values, and plain indexes and arrays beside DTensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy
import optree
import pytest
import torch
import torch.nn.functional as F
from workers import Workers, call_on_mesh

import spmd
from spmd import P
from spmd.errors import DivergenceError, PlanError, ShardingError

MESHES = {
    "two": spmd.make_mesh({"data": 2}, runtime="virtual"),
    "three": spmd.make_mesh({"data": 3}, runtime="virtual"),
    "grid": spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual"),
}


def whole(tree: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, spmd.DTensor) else leaf, tree)


BY_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mask": lambda x: x[x > 0],
    "mask of rows": lambda x: x[x[:, 0] > 0],
    "mask of columns": lambda x: x[:, x[0] > 0],
    "mask and a number": lambda x: x[x[:, 0] > 0, 1],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "values at a mask": lambda x: x.index_put((x > 0,), x[x > 0] * 2),
    "nonzero": lambda x: (x > 0).nonzero(),
    "nonzero of each dim": lambda x: (x > 0).nonzero(as_tuple=True),
    "where": lambda x: torch.where(x > 0),
    "argwhere": lambda x: torch.argwhere(x > 0),
    "unique": lambda x: torch.unique(x.round(), return_inverse=True, return_counts=True),
    "unique rows": lambda x: torch.unique(x.sign(), dim=0),
    "unique_consecutive": lambda x: torch.unique_consecutive(x.sign().flatten()),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x[:, 0].abs().ceil().long(), dim=0),
    "bincount": lambda x: torch.bincount((x > 0).sum(1)),
    "lstsq": lambda x: tuple(torch.linalg.lstsq(x, x[:, :2])),
    "combinations": lambda x: torch.combinations(x[0]),
}
WITH_GRADIENT = ["mask", "mask of rows", "mask and a number", "masked_select", "values at a mask", "repeat_interleave"]


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", BY_VALUES)
def test_results_by_values(name: str, mesh: spmd.Mesh, matrix: torch.Tensor) -> None:
    compute = BY_VALUES[name]
    for spec in (P(), P("data"), P(None, "data"), P(partial={"data": "sum"})):
        x = spmd.distribute(matrix, spec, mesh)
        for _ in range(2):  # planned, and known
            torch.testing.assert_close(whole(compute(x)), compute(matrix))


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_gradients_of_results_by_values(name: str, mesh: spmd.Mesh, matrix: torch.Tensor) -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor | None:
        x.requires_grad_()
        BY_VALUES[name](x).square().sum().backward()
        return x.grad

    torch.testing.assert_close(
        whole(gradient(spmd.distribute(matrix, P("data"), mesh))), gradient(matrix.clone()), check_dtype=True
    )


def test_results_by_values_are_replicated_and_their_gathers_are_seen(matrix: torch.Tensor) -> None:
    x = spmd.distribute(matrix, P("data"), MESHES["two"])
    with spmd.comms_of() as sent:
        assert x.nonzero().spec.is_replicated
    assert sent.count() == {"all_gather": 1} and sent.bytes == 3 * 4 * 4
    assert "by aten.nonzero.default" in sent.comms[0].cause
    with spmd.comms_of(error=True), pytest.raises(PlanError, match=r"aten.nonzero.default at .* communicates"):
        x.nonzero()
    with spmd.comms_of(error=True):
        x.redistribute(P()) if x.spec.is_replicated else spmd.distribute(matrix, P(), MESHES["two"]).nonzero()


def test_writes_of_results_by_values_are_refused(matrix: torch.Tensor) -> None:
    x = spmd.distribute(matrix, P("data"), MESHES["two"])
    with pytest.raises(ShardingError, match=r"nonzero.out at .* writes to a DTensor a result that depends on values"):
        torch.nonzero(x, out=spmd.zeros((20, 2), spec=P(), mesh=MESHES["two"], dtype=torch.int64))


@pytest.mark.parametrize("options", [{"minlength": 9}, {"minlength": 4}, {"minlength": 2}], ids=str)
@pytest.mark.parametrize("weights", [None, torch.float32, torch.float16, torch.int64], ids=str)
def test_bincount(options: dict[str, int], weights: torch.dtype | None) -> None:
    values, mesh = torch.tensor([3, 0, 1, 3, 2]), MESHES["two"]
    given = {} if weights is None else {"weights": torch.arange(5).to(weights)}
    placed = {name: spmd.distribute(tensor, P("data"), mesh) for name, tensor in given.items()}
    with spmd.comms_of() as sent:
        found = torch.bincount(spmd.distribute(values, P("data"), mesh), **placed, **options)
    assert ("all_gather" in sent.count()) is (options["minlength"] == 2)
    torch.testing.assert_close(whole(found), torch.bincount(values, **given, **options))
    with pytest.raises(RuntimeError, match="non-negative"):
        torch.bincount(spmd.distribute(values - 1, P("data"), mesh), minlength=9)


def test_comparisons_send_one_flag(matrix: torch.Tensor) -> None:
    mesh = MESHES["two"]
    x, y = (spmd.distribute(matrix, P("data"), mesh) for _ in range(2))
    for compare in (torch.equal, torch.allclose):
        with spmd.comms_of() as sent:
            assert compare(x, y)
            assert not compare(x, y + 1)
        assert sent.count() == {"all_reduce": 2} and sent.bytes == 2
        assert compare(x, matrix) and compare(x, y.redistribute(P(None, "data")))
    assert not torch.equal(x, y[:3]) and not torch.equal(x, y[:3].redistribute(P()))
    assert torch.allclose(x * float("nan"), x * float("nan"), equal_nan=True)
    assert not torch.allclose(x, x + 0.1) and torch.allclose(x, x + 0.1, atol=0.2)


INDEXES: list[Any] = [
    torch.tensor([0, 2]),
    torch.tensor([[4, -1]]),
    (slice(None), torch.tensor([0, 2])),
    torch.tensor([True, False, True, False, True]),
    torch.ones(5, 4, dtype=torch.bool),
    torch.tensor(True),
    (torch.tensor([True, False, True, False, False]), 0),
    [0, 2],
    [True, False, True, False, True],
    numpy.array([0, 2]),
    numpy.array([True, False, True, False, True]),
    (..., [1]),
    [],
]


@pytest.mark.parametrize("index", INDEXES, ids=str)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_plain_indexes(index: Any, mesh: spmd.Mesh, matrix: torch.Tensor) -> None:
    x = spmd.distribute(matrix, P("data"), mesh)
    torch.testing.assert_close(whole(x[index]), matrix[index])
    written, expected = x.clone(), matrix.clone()
    written[index] = 7.0
    expected[index] = 7.0
    torch.testing.assert_close(whole(written), expected)
    leaf, plain = x.clone().requires_grad_(), matrix.clone().requires_grad_()
    for value in (leaf, plain):
        value[index].square().sum().backward()
    torch.testing.assert_close(whole(leaf.grad), plain.grad)


TAKEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "index_select": lambda x: x.index_select(0, torch.tensor([0, 2])),
    "gather": lambda x: x.gather(1, torch.tensor([[0], [1], [2], [3], [0]])),
    "take": lambda x: x.take(torch.tensor([0, 7])),
    "scatter": lambda x: x.scatter(1, torch.tensor([[0], [1]]), 5.0),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 2]), x[:2]),
    "embedding": lambda x: F.embedding(torch.tensor([[0, 2], [4, 4]]), x),
    "masked_fill": lambda x: x.masked_fill(torch.tensor([True, False, True, False]), 2.0),
    "masked_select": lambda x: x.masked_select(torch.tensor([True, False, True, False])),
}


@pytest.mark.parametrize("name", TAKEN)
def test_operators_with_plain_indexes(name: str, matrix: torch.Tensor) -> None:
    for spec in (P(), P("data"), P(None, "data")):
        x = spmd.distribute(matrix, spec, MESHES["three"])
        torch.testing.assert_close(whole(TAKEN[name](x)), TAKEN[name](matrix))


def test_a_plain_value_beside_a_plain_index_is_refused(matrix: torch.Tensor) -> None:
    x = spmd.distribute(matrix, P("data"), MESHES["two"])
    with pytest.raises(ShardingError, match=r"has a plain tensor f32\[2,4\]"):
        x[torch.tensor([0, 2])] = torch.ones(2, 4)


ARRAYS = [numpy.full(4, 2, numpy.float32), numpy.full((5, 1), 3.0), numpy.arange(4) + 1, numpy.array(2.0)]
OPERATORS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "ne", "lt", "ge"]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
def test_arrays_beside_dtensors(name: str, dtype: torch.dtype, matrix: torch.Tensor) -> None:
    function, value = getattr(operator, name), (matrix.abs() * 3 + 1).to(dtype)
    x = spmd.distribute(value, P("data"), MESHES["two"])
    for array in ARRAYS:
        with spmd.comms_of(error=True):
            found, reverse = function(x, array), function(array, x)
        assert found.spec.dims == reverse.spec.dims == (("data",), ())
        torch.testing.assert_close(whole(found), torch.as_tensor(function(value.numpy(), array)))
        torch.testing.assert_close(whole(reverse), torch.as_tensor(function(array, value.numpy())))


def test_functions_of_numpy(matrix: torch.Tensor) -> None:
    x = spmd.distribute(matrix, P("data"), MESHES["two"])
    array = numpy.full(4, 3.0, numpy.float32)
    assert isinstance(numpy.sin(x), spmd.DTensor)
    torch.testing.assert_close(whole(numpy.sin(x)), matrix.sin())
    torch.testing.assert_close(whole(numpy.add.reduce(x)), matrix.sum(0))
    torch.testing.assert_close(whole(x @ array), matrix @ torch.as_tensor(array))
    torch.testing.assert_close(whole(numpy.float64(2) * x), 2 * matrix)
    assert (x.bfloat16() + array).dtype == torch.float32
    leaf = x.clone().requires_grad_()
    (leaf * array).sum().backward()
    torch.testing.assert_close(whole(leaf.grad), torch.full((5, 4), 3.0))
    before = x
    x += array
    assert x is not before and isinstance(x, spmd.DTensor)


def _by_values(mesh: spmd.Mesh) -> list[Any]:
    matrix = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    x = spmd.distribute(matrix, P("data"), mesh)
    found = [BY_VALUES[name](x) for name in BY_VALUES for _ in range(2)]
    found += [x[torch.tensor([0, 2])], x + numpy.ones(4, numpy.float32), torch.equal(x, matrix)]
    found += [torch.bincount((x > 0).sum(1), minlength=9)]
    return optree.tree_leaves(whole(found))


def test_on_ranks(on_ranks: Callable[..., list[Any]], matrix: torch.Tensor) -> None:
    expected: list[Any] = [BY_VALUES[name](matrix) for name in BY_VALUES for _ in range(2)]
    expected += [matrix[[0, 2]], matrix + 1, True, torch.bincount((matrix > 0).sum(1), minlength=9)]
    for found in on_ranks(_by_values, {"data": 3}):
        torch.testing.assert_close(found, optree.tree_leaves(expected))


def _other_index(mesh: spmd.Mesh) -> list[str]:
    x, rank = spmd.distribute(torch.arange(8.0), P("data"), mesh), spmd.process_index()
    said = []
    for index in (torch.tensor([rank, 3]), numpy.array([rank, 3])):
        try:
            x[index]
        except DivergenceError as error:
            said.append(str(error))
    with spmd.implicit_replication():
        try:
            x @ (torch.full((8,), float(rank)) * torch.arange(8))
        except DivergenceError as error:
            said.append(str(error))
    return said


def test_ranks_with_other_indexes(workers: Workers) -> None:
    for said in workers.run(call_on_mesh, _other_index, {"data": 2}, "distributed", ranks=2):
        assert len(said) == 3
        assert "operand 1 of aten.index.Tensor differs between ranks" in said[0]


def _every_call(mesh: spmd.Mesh) -> list[str]:
    x, rank, said = spmd.distribute(torch.arange(8.0), P("data"), mesh), spmd.process_index(), []
    spmd.init(check="calls")
    x[torch.tensor([1, 3])]
    for call in (lambda: x[torch.tensor([rank, 3])], lambda: x + numpy.arange(8) * rank):
        try:
            call()
        except DivergenceError as error:
            said.append(str(error))
    spmd.init(check="first")
    return said


def test_every_call_is_compared(workers: Workers) -> None:
    for said in workers.run(call_on_mesh, _every_call, {"data": 2}, "distributed", ranks=2):
        assert len(said) == 2
        assert "operand 1 of aten.index.Tensor differs between ranks" in said[0]
        assert "the array" in said[1]


@torch.library.custom_op("spmd_test::without_shape", mutates_args=())
def _without_shape(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def test_an_operator_of_unknown_shape(matrix: torch.Tensor) -> None:
    for spec in (P(), P("data")):
        x = spmd.distribute(matrix, spec, MESHES["three"])
        torch.testing.assert_close(whole(_without_shape(x)), _without_shape(matrix))


def test_tensors_in_keyword_arguments() -> None:
    values = torch.tensor([3.0, 1.0, 2.0])
    x = spmd.distribute(values, P("data"), MESHES["two"])
    torch.testing.assert_close(
        whole(torch.searchsorted(x, x, sorter=x.argsort())), torch.searchsorted(values, values, sorter=values.argsort())
    )
