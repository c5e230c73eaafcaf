"""Values and specs of functions under `shard_map`, where JAX has tests of its own `shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from manual_cases import (
    CUBE,
    EIGHT,
    GRID,
    HOW,
    LINE,
    PAIR,
    WIDE,
    arange,
    assert_same,
    call,
    held,
    randn,
    spec_of,
    varying,
    whole,
)

import spmd
from spmd import P, collectives
from spmd.collectives.environment import bound_axes


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "mesh, spec",
    [
        (CUBE, P("z", ("x", "y"))),
        (CUBE, P(("y", "x"), "z")),
        (LINE, P("x")),
        (spmd.make_mesh({"x": 1, "y": 2}, runtime="virtual"), P("x", "y")),
        (spmd.make_mesh({"data": 1, "seq": 4, "model": 1}, runtime="virtual"), P("data", "seq")),
    ],
    ids=str,
)
def test_identity_keeps_values_and_spec(mesh: spmd.Mesh, spec: P, how: str) -> None:
    x = arange(8, 8)
    y = call(how, spmd.shard_map(lambda a: a, mesh, spec, spec), mesh, (spec,), x)
    assert_same(y, x)
    assert spec == spec_of(y) or how == "inside"  # where the planner leaves out axes of size 1
    assert spmd.distribute(x, spec, mesh).shards[0].shape == y.shards[0].shape


def test_what_is_no_tensor_is_closed_over() -> None:
    def add_ones(x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        ones = lambda a: a + torch.ones(shape, dtype=a.dtype)  # noqa: E731
        return spmd.shard_map(ones, GRID, P("x", "y"), P("x", "y"))(x)

    x = arange(8, 8)
    assert_same(spmd.jit(add_ones, (P("x", "y"),), mesh=GRID, static_argnums=1)(x, (4, 4)), x + 1)


@pytest.mark.parametrize("spec", [P(), P(None)], ids=str)
def test_scalars_and_whole_tensors_enter_by_the_empty_spec(spec: P) -> None:
    assert_same(spmd.shard_map(lambda a: a, LINE, spec, P())(torch.tensor(3.0)), torch.tensor(3.0))


def test_a_result_of_several_tensors_is_stacked_over_ranks() -> None:
    x = arange(2, 10)
    rows = spmd.shard_map(lambda a: a.flatten().chunk(2), PAIR, P(), P("x"))(x)
    for number, row in enumerate(rows):
        assert_same(row, torch.cat([x[number], x[number]]))


def test_a_rank_adds_a_dim() -> None:
    f = spmd.shard_map(lambda a: a[None], GRID, P(), P("x"))
    assert_same(spmd.jit(f, (P(),), mesh=GRID)(torch.tensor(2.0)), torch.full((2,), 2.0))


@pytest.mark.parametrize("how", HOW)
def test_axis_index_of_one_axis(how: str) -> None:
    f = spmd.shard_map(lambda: collectives.axis_index("x")[None], LINE, (), P("x"))
    assert_same(f() if how == "outside" else spmd.jit(f, (), mesh=LINE)(), torch.arange(4))


@pytest.mark.parametrize("how", HOW)
def test_axis_index_of_two_axes(how: str) -> None:
    def indices() -> tuple[torch.Tensor, ...]:
        return tuple(collectives.axis_index(axes)[None, None] for axes in ("x", "y", ("x", "y"), ("y", "x")))

    f = spmd.shard_map(indices, WIDE, (), P("x", "y"))
    rows, columns = torch.arange(4)[:, None], torch.arange(2)[None]
    expected = (rows.expand(4, 2), columns.expand(4, 2), rows * 2 + columns, columns * 4 + rows)
    assert_same(f() if how == "outside" else spmd.jit(f, (), mesh=WIDE)(), expected)


@pytest.mark.parametrize("check", [True, False], ids=["check", "no check"])
def test_axis_index_of_an_axis_of_size_1(check: bool) -> None:
    mesh = spmd.make_mesh({"x": 1, "y": 2, "z": 2}, runtime="virtual")
    names = mesh.names
    f = spmd.shard_map(
        lambda: torch.stack([collectives.axis_index(axis) for axis in names]), mesh, (), P(names), check=check
    )
    assert_same(f(), torch.tensor([[0, y, z] for y in range(2) for z in range(2)]).flatten())


def test_axis_index_of_rank_0_without_the_check() -> None:
    f = spmd.shard_map(lambda: collectives.axis_index("x") + 5, LINE, (), P(), check=False)
    assert_same(f(), torch.tensor(5))


def test_constants_of_a_function_without_arguments() -> None:
    assert_same(spmd.shard_map(lambda: torch.arange(4), LINE, (), P("x"))(), torch.arange(4).repeat(4))
    assert_same(spmd.shard_map(lambda: torch.arange(4), LINE, (), P())(), torch.arange(4))


def test_constants_are_added_to_shards() -> None:
    x = arange(32, dtype=torch.int64)
    f = spmd.shard_map(lambda a: a + torch.arange(a.shape[0]), LINE, P("x"), P("x"))
    assert_same(f(x), x + torch.arange(8).repeat(4))


def test_tensors_made_on_a_device_are_constants_of_every_rank() -> None:
    x = arange(32)
    f = spmd.shard_map(lambda a: a + torch.tensor(1, device="cpu"), LINE, P("x"), P("x"))
    assert_same(f(x), x + 1)
    assert_same(spmd.jit(f, (P("x"),), mesh=LINE)(x), x + 1)


def test_a_full_tensor_of_a_varying_value() -> None:
    def body() -> torch.Tensor:
        base = collectives.pcast(torch.tensor([10, 11]), "x")
        value = collectives.pcast(torch.tensor(-1), "x")
        full = torch.ones_like(base) * value
        assert varying("x") == held(full)
        return full

    assert_same(spmd.shard_map(body, PAIR, (), P("x"))(), torch.full((4,), -1))


LOCAL: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "cumsum": (lambda a: a.cumsum(0), arange(8)),
    "erf": (torch.erf, arange(16) / 7),
    "relu": (torch.relu, arange(16) - 8),
    "top values": (lambda a: a.topk(2).values, torch.tensor([3.0, 1.0, 4.0, 2.0, 9.0, 7.0, 8.0, 0.0])),
    "top indices": (lambda a: a.topk(2).indices, torch.tensor([3.0, 1.0, 4.0, 2.0, 9.0, 7.0, 8.0, 0.0])),
    "inverse": (torch.linalg.inv, randn(4, 5, 5)),
    "argmax": (lambda a: a.argmax(-1, keepdim=True), randn(8, 6)),
    "insertion": (lambda a: torch.cat([a.new_zeros(1), a])[None], arange(100)),
    "empty slice": (lambda a: a[:, 100:116], torch.ones(32, 16)),
    "split": (lambda a: a.chunk(2)[0], arange(8)),
    "slice": (lambda a: a.narrow(0, 1, 2), arange(16)),
    "write in place": (lambda a: torch.zeros_like(a).copy_(a), arange(8)),
    "histogram": (
        lambda a: torch.vmap(lambda q: (q.flatten()[:, None] < arange(9)[None] * 2).sum(0))(a),
        randn(8, 4, 2),
    ),
}


@pytest.mark.parametrize("mesh", [PAIR, LINE], ids=["2", "4"])
@pytest.mark.parametrize("name", LOCAL)
def test_operators_of_one_rank_run_on_its_shard(name: str, mesh: spmd.Mesh) -> None:
    function, x = LOCAL[name]
    if name.startswith("top") and mesh is LINE:
        x = x.repeat(2)
    expected = torch.cat([function(shard) for shard in x.chunk(mesh.size)])
    assert_same(spmd.shard_map(function, mesh, P("x"), P("x"))(x), expected)


def test_solve_and_matrix_exponential() -> None:
    one = spmd.make_mesh({"x": 1}, runtime="virtual")
    solve = spmd.shard_map(torch.linalg.solve, one, P("x"), P("x"))
    assert_same(solve(torch.full((1, 1), 2.0), torch.full((1,), 6.0)), torch.tensor([3.0]))
    matrix, x = torch.complex(randn(8, 8), randn(8, 8)), torch.ones(8, 8, dtype=torch.int64)
    function = lambda v, a: torch.matrix_exp(v).sum() * a.sum(-1).to(v.dtype)  # noqa: E731
    assert_same(spmd.shard_map(function, PAIR, (P(), P("x")), P("x"))(matrix, x), function(matrix, x))


def test_dims_of_a_matrix_over_the_ranks() -> None:
    a, b = randn(16, 32), randn(32, 8)
    conv = lambda a, b: torch.nn.functional.conv1d(a[..., None], b.T[..., None])[..., 0]  # noqa: E731
    f = spmd.shard_map(lambda a, b: collectives.psum(conv(a, b), "x"), LINE, (P(None, "x"), P("x")), P())
    assert_same(f(a, b), a @ b)


def test_a_slice_beyond_the_end_is_empty_on_every_rank_and_globally() -> None:
    x = torch.ones(32, 32)
    f = spmd.shard_map(lambda a: a[:, 100:116], PAIR, P(None, "x"), P(None, "x"))
    assert (32, 0) == tuple(f(x).shape)
    assert (32, 0) == tuple(spmd.jit(lambda a: a[:, 100:116], (P(None, "x"),), mesh=PAIR)(x).shape)


@pytest.mark.parametrize("spec", [P(), P("x"), P(("x", "y"))], ids=str)
def test_a_body_may_print_its_tensors(spec: P, capsys: pytest.CaptureFixture[str]) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        print(a)
        return 2 * a

    x = arange(4)
    assert_same(spmd.shard_map(body, GRID, spec, spec)(x), 2 * x)
    assert capsys.readouterr().out


@pytest.mark.parametrize("how", HOW)
def test_a_jitted_function_is_called_in_the_body(how: str) -> None:
    double = spmd.jit(lambda a: 2 * a, (P(),), P(), mesh=LINE)
    x = arange(4)
    assert_same(call(how, spmd.shard_map(lambda a: double(a) * a, LINE, P("x"), P("x")), LINE, (P("x"),), x), 2 * x * x)


def test_all_axes_are_manual_by_default_and_the_mesh_is_that_of_the_context() -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        assert ("x", "y") == tuple(bound_axes())
        assert varying("x", "y") == held(a) == held(a * 2)
        return a * 2

    f = functools.partial(spmd.shard_map, in_specs=P("x", "y"), out_specs=P("x", "y"))(body)
    x = arange(8, 2)
    with spmd.use_mesh(GRID):
        y = f(x)
        assert_same(spmd.jit(f, (P("x", "y"),))(x), x * 2)
    assert_same(y, x * 2)
    assert P("x", "y") == spec_of(y)


def test_axes_of_size_1_are_named_like_others() -> None:
    mesh = spmd.make_mesh({"x": 2, "y": 1}, runtime="virtual")
    x = arange(8, 2)
    y = spmd.shard_map(lambda a: collectives.psum(a, "x"), mesh, P("x", "y"), P())(x)
    assert_same(y, x[:4] + x[4:])
    assert P() == spec_of(y)


def test_two_meshes_in_one_program() -> None:
    other = spmd.make_mesh({"a": 2, "b": 2}, runtime="virtual")
    inner = spmd.shard_map(lambda a: collectives.psum(a, "x"), GRID, P("x", "y"), P(None, "y"))
    outer = spmd.shard_map(lambda a: collectives.psum(a, "a"), other, P("a", "b"), P(None, "b"))
    x = torch.ones(4, 4)
    assert_same(outer(whole(inner(x))), torch.full((1, 4), 4.0))


def test_random_numbers_of_a_body_follow_the_seed_and_the_types() -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        drawn = torch.distributions.Beta(a, a, validate_args=False).sample()
        assert varying("x") == held(drawn)
        return drawn

    f = spmd.shard_map(body, PAIR, P("x"), P("x"))
    x = torch.ones(64, 1)
    torch.manual_seed(3)
    first = whole(f(x))
    torch.manual_seed(3)
    assert_same(f(x), first)
    assert (0 < first).all() and (first < 1).all()


@pytest.mark.parametrize("kind", ["normal", "integers", "bits", "choice"])
def test_random_numbers_of_each_shard(kind: str) -> None:
    draws: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "normal": torch.randn_like,
        "integers": lambda a: torch.randint_like(a, 16),
        "bits": lambda a: torch.randint(0, 256, a.shape, dtype=torch.uint8),
        "choice": lambda a: torch.multinomial(a.abs() + 1, 1),
    }
    y: Any = whole(spmd.shard_map(draws[kind], LINE, P("x"), P("x"))(randn(8, 4)))
    assert 8 == y.shape[0]
    assert y.isfinite().all()


def test_repeats_by_counts_with_a_batch() -> None:
    x, counts = arange(4, 2), torch.tensor([[1, 3], [2, 2], [4, 0], [0, 4]])
    body = lambda a, n: torch.repeat_interleave(a, n, output_size=4)  # noqa: E731
    rows = [spmd.shard_map(body, PAIR, (P(), P()), P())(a, n) for a, n in zip(x, counts, strict=True)]
    assert_same(rows, [torch.repeat_interleave(a, n) for a, n in zip(x, counts, strict=True)])


def test_eight_ranks_count_themselves() -> None:
    f = spmd.shard_map(lambda: collectives.psum(torch.ones(()), "x"), EIGHT, (), P())
    assert_same(f(), torch.tensor(8.0))
