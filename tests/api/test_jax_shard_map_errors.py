"""Errors of `shard_map`, and what its bodies print, where JAX has tests of its own `shard_map`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from manual_cases import CUBE, GRID, HOW, LINE, PAIR, WIDE, arange, assert_same, call, randn
from torch.func import grad, linearize, vjp

import spmd
from spmd import P, collectives

ROWS, BOTH = P("x"), P("x", "y")


def mapped(body: Callable[..., Any], mesh: spmd.Mesh = LINE, ins: Any = ROWS, outs: Any = ROWS, **options: Any) -> Any:
    return spmd.shard_map(body, mesh, ins, outs, **options)


@pytest.mark.parametrize("how", HOW)
def test_a_result_that_varies_along_an_axis_left_out(how: str) -> None:
    with pytest.raises(spmd.ShardingError, match=r"P\(None, 'y'\) says that it is invariant along 'x'.* Call .*psum"):
        call(how, mapped(lambda a: 2 * a, GRID, BOTH, P(None, "y")), GRID, (BOTH,), arange(8, 8))
    fixed = mapped(lambda a: collectives.psum(a, "x"), GRID, BOTH, P(None, "y"))
    assert_same(call(how, fixed, GRID, (BOTH,), arange(8, 8)), arange(2, 4, 8).sum(0))


def test_a_result_that_varies_along_one_of_three_axes() -> None:
    f = mapped(lambda a: a * 2, CUBE, P("x", "y", "z"), P("x"))
    message = r"result f64\[2,1,1\]: P\('x'\) says that it is invariant along 'y', and it is varying since it entered"
    with pytest.raises(spmd.ShardingError, match=message):
        f(arange(4, 2, 2))


PREFIXES: dict[str, tuple[Callable[..., Any], Any, Any, tuple[Any, ...], str]] = {
    "a list of one spec for two": (
        lambda a: a,
        ([BOTH],),
        BOTH,
        ([arange(8, 8)] * 2,),
        "in_specs does not fit the arguments at 0",
    ),
    "more specs than arguments": (
        lambda *args: args[0] @ args[1],
        (BOTH, BOTH, P()),
        BOTH,
        (arange(8, 8), arange(8, 8)),
        "in_specs does not fit the arguments: expected one spec or a tuple of 2",
    ),
    "fewer specs than arguments": (
        lambda *args: (),
        (ROWS, ROWS),
        (),
        (arange(8), arange(8), arange(8)),
        "in_specs does not fit the arguments: expected one spec or a tuple of 3",
    ),
    "two specs for one result": (lambda a: a, ROWS, (ROWS, P()), (arange(8),), "out_specs does not fit the result"),
    "None for a tensor": (lambda a: a, None, P(), (arange(8),), r"None is not a spec. Write P\(\)"),
}


@pytest.mark.parametrize("name", PREFIXES)
def test_specs_that_are_no_prefix(name: str) -> None:
    body, ins, outs, args, message = PREFIXES[name]
    with pytest.raises(spmd.ShardingError, match=message):
        mapped(body, GRID, ins, outs)(*args)


@pytest.mark.parametrize("how", HOW)
def test_a_result_that_is_no_tensor(how: str) -> None:
    f = mapped(lambda: {"hi": [3.0]}, GRID, (), {"hi": ROWS})
    with pytest.raises(
        spmd.TraceError, match=r"Result \['hi'\]\[0\] of shard_map\(.*must be a tensor \(got float 3.0\)"
    ):
        f() if how == "outside" else spmd.jit(f, (), mesh=GRID)()


@pytest.mark.parametrize(
    "ins, arg, message",
    [
        (({"hi": ROWS},), {"hi": [torch.tensor(3.0)]}, r"argument 0\['hi'\]\[0\] f32\[\]: P\('x'\) names 1 dims"),
        ((BOTH,), arange(4), r"P\('x', 'y'\) names 2 dims but the tensor f64\[4\] has 1"),
        (P("q"), arange(4), r"Unknown mesh axis 'q' in P\('q'\)"),
        (P(), 3, r"Argument 0 of shard_map\(.* must be a tensor \(got int 3\)"),
    ],
    ids=["a scalar", "too few dims", "unknown axis", "an integer"],
)
def test_specs_that_do_not_fit_an_argument(ins: Any, arg: Any, message: str) -> None:
    with pytest.raises((spmd.ShardingError, spmd.TraceError), match=message):
        mapped(lambda a: (), GRID, ins, ())(arg)


def test_specs_that_do_not_fit_an_argument_beside_one_of_another_structure() -> None:
    for ins, args in (
        ((P(), BOTH), (None, arange(4))),
        ((BOTH, P()), (arange(4), None)),
        ((BOTH, P()), (arange(4), (None, None))),
        (((P(), P()), BOTH), ((None, None), arange(4))),
    ):
        with pytest.raises(spmd.ShardingError, match="names 2 dims but the tensor"):
            mapped(lambda *_: None, WIDE, ins, None)(*args)


def test_a_result_of_too_few_dims() -> None:
    with pytest.raises(spmd.ShardingError, match=r"out_specs of result.* names 1 dims but the tensor f64\[\] has 0"):
        mapped(lambda a: a.sum())(arange(8))


def test_a_function_without_a_name() -> None:
    with pytest.raises(spmd.ShardingError, match=r"names 2 dims but the tensor f64\[4\] has 1"):
        mapped(functools.partial(lambda a: a), LINE, P(None, "x"))(arange(4))
    with pytest.raises(spmd.ShardingError, match=r"shard_map\(partial\), out_specs"):
        mapped(functools.partial(lambda a: a), LINE, ROWS, P())(arange(4))


def test_trees_with_none() -> None:
    body = lambda tree, a: a.sin() if tree["a"] is None else a  # noqa: E731
    for ins in (({"a": None}, ROWS), (P(), ROWS)):
        assert_same(mapped(body, LINE, ins)({"a": None}, arange(4)), arange(4).sin())
    assert mapped(lambda a: None, LINE, ROWS, None)(arange(4)) is None


@pytest.mark.parametrize("arg", [object(), (2,), {"a": object()}], ids=["object", "numbers", "tree"])
def test_what_is_no_tensor_is_refused_as_an_argument(arg: Any) -> None:
    with pytest.raises(spmd.SpmdError, match=r"[Aa]rgument 0.* (is no|must be a) tensor \(got"):
        mapped(lambda given, a: a, LINE, (P(), ROWS))(arg, arange(8))
    assert_same(mapped(lambda a: a if arg else 0 * a)(arange(8)), arange(8))


# Meshes and axes.


def test_no_mesh() -> None:
    with pytest.raises(spmd.MeshError, match="No mesh was given and none is set"):
        spmd.shard_map(lambda a: a, in_specs=P(), out_specs=P())(arange(8))


def test_a_mesh_without_axes() -> None:
    with pytest.raises(spmd.MeshError, match="A mesh needs at least one axis"):
        spmd.make_mesh({}, runtime="virtual")


def test_another_mesh_in_a_body() -> None:
    other = spmd.make_mesh({"k": 2, "l": 2}, runtime="virtual")
    inner = spmd.shard_map(lambda a: a * a, other, P("k"), P("k"), axis_names={"k"})
    with pytest.raises(spmd.SpmdError, match=r"Mesh\(x=2, y=2\)"):
        spmd.jit(mapped(inner, GRID, ROWS, ROWS, axis_names={"x"}), (BOTH,), mesh=GRID)(arange(4, 8))
    zeros = spmd.jit(lambda: torch.zeros(()), (), P(), mesh=other)
    with pytest.raises(spmd.MeshError, match="Functions that call each other share one mesh"):
        spmd.jit(mapped(lambda a: a + zeros(), GRID, ROWS, ROWS), (BOTH,), mesh=GRID)(arange(4, 8))


def test_an_axis_that_is_manual_already() -> None:
    inner = spmd.shard_map(lambda a: a, GRID, P(), P(), axis_names={"x"})
    with pytest.raises(spmd.MeshError, match="Mesh axis 'x' is manual already"):
        mapped(inner, GRID, ROWS, ROWS, axis_names={"x"})(arange(4, 8))


@pytest.mark.parametrize("axes", ["x", "xy"])
def test_a_constraint_along_a_manual_axis(axes: str) -> None:
    f = mapped(lambda a: spmd.constrain(a, BOTH) ** 2, GRID, ROWS, ROWS, axis_names=tuple(axes))
    with pytest.raises(spmd.ShardingError, match=r"names 'x', which is manual in this shard_map body"):
        spmd.jit(f, (BOTH,), mesh=GRID)(arange(4, 8))


def test_specs_along_an_automatic_axis() -> None:
    f = mapped(lambda a: a, GRID, BOTH, ROWS, axis_names={"x"})
    with pytest.raises(
        spmd.ShardingError, match=r"in_specs of argument 0: P\('x', 'y'\) names 'y', which is not manual"
    ):
        spmd.jit(f, (BOTH,), mesh=GRID)(arange(4, 8))
    f = mapped(lambda a: a, GRID, ROWS, BOTH, axis_names={"x"})
    with pytest.raises(
        spmd.ShardingError, match=r"out_specs of result.*: P\('x', 'y'\) names 'y', which is not manual"
    ):
        spmd.jit(f, (BOTH,), mesh=GRID)(arange(4, 8))
    with pytest.raises(spmd.MeshError, match="axis_names has 'q'"):
        mapped(lambda a: a, axis_names={"q"})(arange(4))


@pytest.mark.parametrize("name", ["psum", "pmax", "pcast", "all_gather", "axis_index"])
def test_a_collective_outside_of_a_body(name: str) -> None:
    function = getattr(collectives, name)
    given = (lambda x: function("x")) if name == "axis_index" else lambda x: function(x, "x")
    for run in (given, spmd.jit(given, (ROWS,), mesh=LINE)):
        with pytest.raises(spmd.SpmdError, match=r"No mesh axis is bound at .* Use collectives inside spmd.shard_map"):
            run(arange(8))


def test_a_collective_over_an_automatic_axis() -> None:
    f = mapped(lambda a: collectives.pcast(a, "y"), GRID, P(), ROWS, axis_names={"x"}, check=False)
    with pytest.raises(spmd.SpmdError, match="Unknown mesh axis 'y'"):
        spmd.jit(f, (P(),), mesh=GRID)(arange(8))


def test_a_set_of_axes_has_no_order() -> None:
    for name in ("pcast", "psum", "all_gather"):
        with pytest.raises(spmd.SpmdError, match="must be a mesh axis or a tuple of them"):
            mapped(lambda a, name=name: getattr(collectives, name)(a, {"x"}), PAIR, P())(arange(8))


PERMUTATIONS = [
    ([(0, 1), (0, 1)], "a source or destination is there twice"),
    ([(0, 1), (2, 1)], "a source or destination is there twice"),
    ([(0, 4)], r"must hold indices in 0\.\.3"),
]


@pytest.mark.parametrize("pairs, message", PERMUTATIONS, ids=["source", "destination", "range"])
def test_pairs_of_ranks_that_are_no_permutation(pairs: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(spmd.SpmdError, match=message):
        mapped(lambda a: collectives.ppermute(a, "x", pairs))(arange(8))


def test_an_if_on_a_value() -> None:
    body = lambda a: a if collectives.psum(a, ("x", "y")).sum() < 0 else -a  # noqa: E731
    with pytest.raises(spmd.TraceError, match=r"needs the values of tensor .*torch.where.* in place of `if`"):
        mapped(body, GRID, BOTH, BOTH)(arange(2, 2))
    chosen = lambda a: torch.where(collectives.psum(a, ("x", "y")).sum() < 0, a, -a)  # noqa: E731
    assert_same(mapped(chosen, GRID, BOTH, BOTH)(arange(2, 2)), -arange(2, 2))
    sign = lambda: torch.where(collectives.psum(collectives.axis_index("x"), "x") > 0, 1.0, -1.0)  # noqa: E731
    assert_same(mapped(sign, LINE, (), P())(), torch.tensor(1.0))


# Types.


def test_a_cotangent_that_varies_for_a_value_that_does_not() -> None:
    square = lambda p: (p**2).mean()  # noqa: E731

    def body(t: torch.Tensor) -> torch.Tensor:
        _, forward = linearize(square, torch.ones(1, dtype=t.dtype))
        return vjp(square, torch.ones(1, dtype=t.dtype))[1](forward(t))[0]

    with pytest.raises(
        spmd.TraceError, match=r"A cotangent at .* is varying along 'x', and that of a value that is inv"
    ):
        mapped(body, PAIR)(torch.ones(2, dtype=torch.float64))


def test_a_write_of_a_varying_value_to_an_invariant_one() -> None:
    with pytest.raises(spmd.TraceError, match=r"varying along 'x' in place .*pcast\(x, 'x', to='varying'\)"):
        mapped(lambda a: torch.zeros(2, dtype=a.dtype).add_(a), LINE, ROWS, P())(arange(8))


def test_a_write_to_an_argument_of_the_function() -> None:
    state = arange(8)
    f = mapped(lambda a: a.add_(collectives.axis_index("x")))
    assert_same(f(state), arange(8) + torch.arange(4).repeat_interleave(2))
    assert_same(state, arange(8))
    closed = mapped(lambda a: state.add_(a.sum()), LINE, ROWS, P())
    with pytest.raises(spmd.TraceError, match=r"writes in place to a tensor from outside of the shard_map body"):
        closed(arange(8))


@pytest.mark.parametrize(
    "ins, outs",
    [
        (P(), P(partial={"x": "sum"})),
        (ROWS, P(partial={"x": "sum"})),
        (P(partial={"x": "sum"}), P()),
        (P(partial={"x": "sum"}), ROWS),
    ],
    ids=["I U", "V U", "U I", "U V"],
)
def test_the_check_cannot_be_left_out_for_summands(ins: P, outs: P) -> None:
    with pytest.raises(spmd.ShardingError, match=r"says that it is \w+ along 'x', and it is \w+ since"):
        mapped(lambda a: a, PAIR, ins, outs, check=False)(arange(8))


def test_a_closed_over_dtensor_outside_of_jit() -> None:
    x, w = arange(4, 4), arange(2, 4)
    expected = (w.view(2, 1, 4) * x.view(2, 2, 4)).sum(-1).flatten()
    given = mapped(lambda w, x: (w * x).sum(-1), PAIR, (ROWS, ROWS), ROWS)(w, x)
    assert_same(given, expected)
    assert_same(mapped(lambda x: (w[:1] * x).sum(-1), PAIR)(x), (w[:1] * x).sum(-1))
    held = spmd.distribute(w, ROWS, PAIR)
    with pytest.raises(spmd.TraceError, match=r"closes over a DTensor .* Pass it as an argument"):
        mapped(lambda x: (held * x).sum(-1), PAIR)(x)


def test_decorators_with_keywords() -> None:
    @spmd.shard_map(mesh=PAIR, in_specs=ROWS, out_specs=P())
    def total(a: torch.Tensor) -> torch.Tensor:
        return collectives.psum(a, "x")

    assert_same(total(arange(4)), torch.tensor([2.0, 4.0], dtype=torch.float64))
    assert re.search("total", repr(total))


# What bodies print.


def printed(capsys: pytest.CaptureFixture[str], how: str, f: Any, mesh: spmd.Mesh, *args: torch.Tensor) -> str:
    capsys.readouterr()
    f(*args) if how == "outside" else spmd.jit(f, (P(),) * len(args), mesh=mesh)(*args)
    return capsys.readouterr().out


@pytest.mark.parametrize("how", HOW)
def test_each_rank_prints_its_values(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        index = collectives.axis_index("x")
        spmd.debug.print("instance {i} has value x={x}", i=index, x=a)
        y = a.cos()
        spmd.debug.print("instance {i} has value y={y}", i=index, y=y)
        return y

    lines = printed(capsys, how, mapped(body), LINE, torch.arange(8))
    for rank in range(4):
        assert f"instance {rank} has value x=tensor([{2 * rank}, {2 * rank + 1}])" in lines
        assert f"instance {rank} has value y=" in lines
    assert lines.rindex("has value x=") < lines.index("has value y=")


@pytest.mark.parametrize("how", HOW)
def test_bodies_over_some_axes_print(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    def body(a: torch.Tensor) -> None:
        spmd.debug.print("x={x}", x=a)

    lines = printed(capsys, how, mapped(body, WIDE, ROWS, None, axis_names={"x"}, check=False), WIDE, torch.arange(8))
    rows = re.findall(r"x=tensor\(\[(.*?)\]\)", lines)  # along the automatic axis, shards by the planner's choice
    assert 8 == len(rows)
    assert set("01234567") == {number for row in rows for number in row.split(", ")}


# Without programs.


def test_bodies_run_rank_by_rank_without_jit() -> None:
    with spmd.disable_jit():
        assert_same(mapped(lambda a: a, PAIR)(arange(8)), arange(8))


def test_bodies_without_jit_may_decide_by_values() -> None:
    body = lambda a: a if collectives.psum(a, ("x", "y")).sum() < 0 else -a  # noqa: E731
    with spmd.disable_jit():
        assert_same(mapped(body, GRID, BOTH, BOTH)(arange(2, 2)), -arange(2, 2))


def test_bodies_without_jit_may_look_at_values() -> None:
    seen: list[str] = []
    with spmd.disable_jit():
        mapped(lambda a: seen.append(str(a)) or a, PAIR)(torch.arange(4))
    assert {"tensor([0, 1])", "tensor([2, 3])"} == set(seen)


@pytest.mark.parametrize("how", HOW)
def test_uneven_shards(how: str) -> None:
    x = randn(6)
    assert_same(call(how, mapped(lambda a: a.sin()), LINE, (ROWS,), x), x.sin())
    assert_same(call(how, grad(lambda x: mapped(lambda a: a.sin())(x).sum()), LINE, (ROWS,), x), x.cos())
