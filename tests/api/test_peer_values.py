"""DTensors as values, where torch's DTensor has tests: shards and sizes, redistribution, gradients, pickles, errors."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import P, Partial, Replicate, Shard
from spmd.errors import ShardingError

pytestmark = pytest.mark.filterwarnings("ignore::spmd.api.programs.missing_rules.MissingRuleWarning")

LINE = spmd.make_mesh({"x": 4}, runtime="virtual")
GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
CUBE = spmd.make_mesh({"x": 2, "y": 2, "z": 2}, runtime="virtual")
EIGHT = spmd.make_mesh({"x": 8}, runtime="virtual")
PENDING = P(partial={"x": "sum"})


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def whole(tree: Any) -> Any:
    """The tree with plain tensors for DTensors."""
    return optree.tree_map(lambda leaf: leaf.detach().full_tensor() if isinstance(leaf, spmd.DTensor) else leaf, tree)


def assert_same(actual: Any, expected: Any) -> None:
    expected = optree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, expected)
    torch.testing.assert_close(whole(actual), expected, rtol=1e-6, atol=1e-7)


def layouts(ndim: int, mesh: spmd.Mesh) -> list[P]:
    """Specs of a tensor: each dim on an axis, several dims and axes, and a sum that is pending."""
    if mesh is GRID:
        specs = [P("x", "y"), P(None, "x", partial={"y": "sum"})] if ndim > 1 else [P(partial={"x": "sum", "y": "sum"})]
        return specs + ([P(("y", "x"))] if ndim else [])
    return [P(), PENDING, *(P(*(None,) * dim, "x") for dim in range(ndim))]


def place(args: tuple[Any, ...], mesh: spmd.Mesh, turn: int) -> list[Any]:
    """Copies of the arguments on the mesh, each tensor under the layout after that of the tensor before."""

    def placed(position: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        specs = layouts(value.ndim, mesh)
        if value.dtype in (torch.bool, torch.float8_e4m3fn):
            specs = [spec for spec in specs if not spec.partial] or [P()]
        return spmd.distribute(value, specs[(turn + position) % len(specs)], mesh)

    return [placed(position, value) for position, value in enumerate(args)]


def with_gradients(function: Callable[..., Any], args: list[Any]) -> Any:
    """What the function returns, and the gradients of the sum of its squares."""
    for value in args:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    results = function(*args)
    losses = [
        (torch.view_as_real(leaf) if leaf.is_complex() else leaf).square().sum()
        for leaf in optree.tree_leaves(results)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if losses:
        sum(losses[1:], losses[0]).backward()
    return results, [value.grad for value in args if isinstance(value, torch.Tensor) and value.grad is not None]


def check(function: Callable[..., Any], *args: Any, gradients: bool = True) -> None:
    """The function of DTensors under many layouts is the function of plain tensors, and so are its gradients."""
    call = with_gradients if gradients else lambda function, args: function(*args)
    copies = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in args]
    expected = call(function, copies)
    most = max(value.ndim for value in args if isinstance(value, torch.Tensor))
    for mesh in (LINE, GRID):
        count = len(layouts(most, mesh))
        for turn in range(1, count) if mesh is LINE and most else range(0, count, 2):
            torch.manual_seed(0)
            assert_same(call(function, place(args, mesh, turn)), expected)


SIZES = {
    "rows": (LINE, P("x"), (3, 3), (12, 3)),
    "columns": (LINE, P(None, "x"), (8, 4), (8, 16)),
    "replicas": (LINE, P(), (3, 3), (3, 3)),
    "a sum": (LINE, PENDING, (3, 3), (3, 3)),
    "two dims on two axes": (GRID, (Shard(0), Shard(1)), (3, 3), (6, 6)),
    "one dim on two axes": (GRID, (Shard(0), Shard(0)), (3, 3), (12, 3)),
    "three dims on three axes": (CUBE, (Shard(0), Shard(1), Shard(2)), (3, 3, 3), (6, 6, 6)),
    "two dims on three axes": (CUBE, (Shard(0), Shard(0), Shard(2)), (3, 3, 3), (12, 3, 6)),
    "the last dim": (LINE, (Shard(-1),), (3, 3), (3, 12)),
}


@pytest.mark.parametrize("name", SIZES)
def test_size_and_stride_follow_from_local_shards(name: str) -> None:
    mesh, spec, local, shape = SIZES[name]
    x = spmd.DTensor.from_local([torch.ones(local)] * mesh.size, mesh, spec)
    assert (shape, torch.empty(shape).stride()) == (tuple(x.shape), x.stride())
    assert x.device == torch.device("cpu") == x.full_tensor().device
    assert type(x.full_tensor()) is torch.Tensor


def test_shards_in_another_memory_layout_have_the_values_of_their_elements() -> None:
    shards = [randn(8, 4, 2).permute(1, 2, 0) + rank for rank in range(4)]
    assert_same(spmd.DTensor.from_local(shards, LINE, P(None, "x")), torch.cat(shards, 1))


@pytest.mark.parametrize("rows", range(9))
def test_uneven_and_empty_shards(rows: int) -> None:
    value = randn(rows, 2)
    x = spmd.distribute(value, P("x"), EIGHT)
    assert [1] * rows + [0] * (8 - rows) == [len(shard) for shard in x.shards]
    again = spmd.DTensor.from_local(list(x.shards), EIGHT, P("x"), shape=(rows, 2))
    assert_same(again, value)
    assert again.spec == x.spec


def test_uneven_shards_need_no_shape() -> None:
    value = randn(5, 2)
    x = spmd.DTensor.from_local([*value.split(2), value[:0]], LINE, P("x"))
    assert_same(x, value)
    assert x.stride() == value.stride()


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("y"), P(None, "y"), P("x", "y"), P(("y", "x"))], ids=repr)
def test_shards_are_the_slices_of_the_global_tensor(spec: P) -> None:
    value = torch.arange(8 * 12).view(8, 12)
    x = spmd.distribute(value, spec, GRID)
    for coordinate, shard in zip(GRID.coordinates(), x.shards, strict=True):
        assert torch.equal(value[x.spec.local_slices(coordinate)], shard)
    assert torch.equal(torch.arange(8 * 12).view(8, 12), value)


def test_each_rank_holds_its_number() -> None:
    x = spmd.distribute(torch.arange(4).view(2, 2), P("x", "y"), GRID)
    assert [0, 1, 2, 3] == [shard.item() for shard in x.shards]


def test_a_dim_on_several_axes_is_split_by_the_first_one_first() -> None:
    def spec_of(*placements: Any) -> P:
        return spmd.DTensor.from_local([torch.ones(8, 6, 5)] * 8, CUBE, placements).spec.pspec

    assert P("z", ("x", "y")) == spec_of(Shard(1), Shard(1), Shard(0))
    assert P(None, ("x", "z"), "y") == spec_of(Shard(1), Shard(2), Shard(1))
    assert P() == spec_of(Replicate(), Replicate(), Replicate())
    assert P(partial={"x": "sum"}) == spec_of(Partial(), Replicate(), Replicate())


def test_specs_are_equal_where_layouts_are() -> None:
    first, second = (spmd.distribute(randn(8, 6), P(("x", "y")), GRID) for _ in range(2))
    assert first.spec == second.spec and hash(first.spec) == hash(second.spec)
    for other in (P(("y", "x")), P("x"), P()):
        moved = first.redistribute(other)
        assert moved.spec != first.spec and hash(moved.spec) != hash(first.spec)


def test_a_spec_does_not_follow_the_list_that_it_was_made_of() -> None:
    placements = [Shard(0)]
    x = spmd.DTensor.from_local([torch.ones(3, 3)] * 4, LINE, placements)
    placements[0] = Replicate()  # type: ignore[call-overload]
    assert (Shard(0),) == x.placements


def test_the_mesh_of_a_context() -> None:
    value = randn(16, 3)
    with spmd.use_mesh(LINE):
        x = spmd.distribute(value, P("x"))
        assert x.redistribute(P()).mesh is LINE
        with spmd.use_mesh(GRID):
            assert (8, 3) == spmd.distribute(value, P("x")).shards[0].shape
        assert (4, 3) == spmd.distribute(value, P("x")).shards[0].shape


REDISTRIBUTED = [P(), P("x"), P(None, "x"), P("x", "y"), P(("y", "x")), P("y", partial={"x": "sum"})]


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(REDISTRIBUTED, 2)), ids=repr)
def test_redistribution(source: P, target: P) -> None:
    value = randn(5, 7)
    moved = spmd.distribute(value, source, GRID).redistribute(target)
    assert_same(moved, value)
    assert target == moved.spec.pspec


MOVES: dict[str, Callable[[Any], Any]] = {
    "redistribute": lambda x: x.redistribute(P()),
    "redistribute to a sum": lambda x: x.redistribute(PENDING),
    "reshard": lambda x: spmd.reshard(x, P(None, "x")),
    "full_tensor": lambda x: x.full_tensor(),
    "a jitted identity": spmd.jit(lambda x: x, P("x"), P(), mesh=LINE),
}


@pytest.mark.parametrize("name", MOVES)
def test_gradients_cross_moves(name: str) -> None:
    value = randn(8, 3)
    x = spmd.distribute(value, P("x"), LINE).requires_grad_()
    MOVES[name](x * 3).square().sum().backward()
    assert_same(x.grad, value * 18)
    assert P("x") == x.grad.spec.pspec


@pytest.mark.parametrize("given", [P(), P("x"), PENDING], ids=repr)
@pytest.mark.parametrize("spec", [P(), P("x"), PENDING], ids=repr)
def test_gradients_reach_local_shards(spec: P, given: P) -> None:
    """A shard has the gradient of its part, and replicas and the parts of a sum that of the whole."""
    rows = 2 if spec == P("x") else 8
    leaves = [torch.ones(rows, 3, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    x = spmd.DTensor.from_local([leaf * 3 for leaf in leaves], LINE, spec)
    assert not x.is_leaf
    gradient = spmd.DTensor.from_local([torch.ones(2 if given == P("x") else 8, 3).double()] * 4, LINE, given)
    (x * 2).backward(gradient)
    expected = gradient.full_tensor() * 6
    assert_same([leaf.grad for leaf in leaves], list(expected.split(2)) if spec == P("x") else [expected] * 4)


@pytest.mark.parametrize("given", [P(), P("x"), PENDING], ids=repr)
@pytest.mark.parametrize("spec", [P(), P("x"), PENDING], ids=repr)
def test_the_gradient_of_a_result_may_have_any_spec(spec: P, given: P) -> None:
    x = spmd.distribute(randn(8, 3), spec, LINE).requires_grad_()
    gradient = spmd.DTensor.from_local([torch.ones(2 if given == P("x") else 8, 3).double()] * 4, LINE, given)
    (x * 2).backward(gradient)
    assert_same(x.grad, gradient.full_tensor() * 2)


def test_new_tensors_have_gradients() -> None:
    x = spmd.distribute(randn(8, 4), P("x"), LINE).requires_grad_()
    new = x.new_empty_strided((8, 4), (4, 1), requires_grad=True)
    (new.sum() + x.sum()).backward()
    assert_same((new.grad, x.grad), (torch.ones(8, 4).double(),) * 2)


def test_as_strided_over_the_same_elements() -> None:
    x = spmd.distribute(randn(8, 4), P("x"), LINE)
    for y in (x, x.t(), x[2:]):
        again = y.as_strided(y.size(), y.stride(), y.storage_offset())
        assert_same(again, y.full_tensor())
        assert again.stride() == y.stride()


@pytest.mark.parametrize("weights_only", [False, True])
def test_save_and_load(weights_only: bool) -> None:
    x = spmd.distribute(randn(5, 3), P("x"), LINE)
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=weights_only)
    assert_same(again, x.full_tensor())
    assert again.spec == x.spec


def test_loading_needs_the_package_to_be_imported(tmp_path: Path) -> None:
    torch.save(spmd.distribute(torch.arange(6), P("x"), LINE), tmp_path / "x")
    code = (
        "import sys, pickle, torch\n"
        "try: torch.load(sys.argv[1], weights_only=True)\n"
        "except pickle.UnpicklingError: import spmd; print(torch.load(sys.argv[1], weights_only=True).tolist())"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "x")]
    assert "[0, 1, 2, 3, 4, 5]" == subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_plain_tensors_in_a_context_of_replication() -> None:
    value = randn(16, 3)
    with spmd.implicit_replication():
        result = torch.ones(3) + spmd.distribute(value, P("x"), LINE)
    assert_same(result, value + 1)
    assert P("x") == result.spec.pspec


@pytest.mark.parametrize("one", [torch.tensor(2), torch.tensor([2]), torch.tensor([[2.0]])], ids=repr)
def test_a_plain_tensor_of_one_element_is_replicated(one: torch.Tensor) -> None:
    value = randn(4, 3)
    x = spmd.distribute(value, P("x"), LINE)
    assert_same((one + x, x * one), (one + value, value * one))


def test_vmap_of_embedding() -> None:
    index, table = torch.tensor([[0, 1, 0], [2, 3, 7]]).repeat(2, 1), randn(4, 8, 5)
    placed = spmd.distribute(index, P("x"), LINE), spmd.distribute(table, P("x"), LINE)
    result = torch.vmap(F.embedding)(*placed)  # torch's batching rule makes a plain tensor
    assert_same(result, torch.vmap(F.embedding)(index, table))


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a tensor without data": (
        lambda: spmd.distribute(torch.empty(4, device="meta"), P("x"), LINE),
        ShardingError,
        "must be a torch.Tensor with data .got a meta tensor",
    ),
    "a shard without data": (
        lambda: spmd.DTensor.from_local([torch.empty(1, device="meta")] * 4, LINE, P("x")),
        ShardingError,
        "must be on cpu .got meta",
    ),
    "a shard that is a DTensor": (
        lambda: spmd.DTensor.from_local([spmd.distribute(torch.ones(4), P(), LINE)] * 4, LINE, P("x")),
        ShardingError,
        "must be a plain torch.Tensor .got DTensor",
    ),
    "shards of several dtypes": (
        lambda: spmd.DTensor.from_local([torch.ones(2)] * 3 + [torch.ones(2).double()], LINE, P("x")),
        ShardingError,
        r"Shard of rank 3 must be f32\[2\] .*got f64\[2\]",
    ),
    "an axis twice": (lambda: P("x", "x"), ShardingError, "Mesh axis 'x' is used twice"),
    "an axis in two ways": (lambda: P("x", partial={"x": "sum"}), ShardingError, "Mesh axis 'x' is used twice"),
    "an unknown axis": (lambda: spmd.distribute(torch.ones(4), P("w"), LINE), ShardingError, "Unknown mesh axis 'w'"),
    "too many dims": (lambda: spmd.distribute(torch.ones(4), P(None, "x"), LINE), ShardingError, "names 2 dims"),
    "a dim that is not there": (lambda: spmd.distribute(torch.ones(4), (Shard(1),), LINE), ShardingError, "(?i)dim"),
    "the mean as a pending reduction": (
        lambda: P(partial={"x": "mean"}),  # type: ignore[dict-item]
        ShardingError,
        "must be one of sum, max, min",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name: str) -> None:
    call, error, text = CALLS[name]
    with pytest.raises(error, match=text):
        call()
