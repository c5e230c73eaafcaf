"""Convolutions whose images are sharded over space: what ranks exchange, and the same values as on one device."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from optree import tree_leaves
from sampling import product

import spmd
from spmd import P
from spmd.core.placement import Shard
from spmd.rules import RULES, Factors, Rule
from spmd.rules.ops.convolution import CONVOLUTION

# The operator, the shapes of image and weight, its options.
CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "k3_s1_p1": (F.conv2d, (2, 3, 12, 5), (4, 3, 3, 3), {"padding": 1}),
    "k3_s2": (F.conv2d, (2, 3, 13, 5), (4, 3, 3, 3), {"stride": 2}),
    "dilated": (F.conv2d, (2, 3, 16, 5), (4, 3, 3, 2), {"dilation": 2, "padding": (2, 0)}),
    "transposed": (F.conv_transpose2d, (2, 3, 9, 4), (3, 4, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "one_dim": (F.conv1d, (2, 3, 11), (4, 3, 4), {"padding": 2}),
    "three_dims": (F.conv3d, (1, 2, 6, 3, 4), (2, 2, 3, 1, 2), {"padding": (1, 0, 0)}),
    "groups": (F.conv2d, (2, 4, 10, 4), (6, 2, 3, 3), {"padding": 1, "groups": 2}),
    "larger_than_a_shard": (F.conv1d, (2, 3, 9), (4, 3, 11), {"padding": 5}),
    "large": (F.conv2d, (1, 2, 49, 34), (2, 2, 3, 5), {"padding": 1}),
    "large_and_transposed": (F.conv_transpose2d, (1, 2, 45, 46), (2, 2, 3, 3), {"stride": 2, "padding": 1}),
    "few_columns": (F.conv2d, (2, 3, 5, 2), (4, 3, 3, 3), {"padding": 1}),
    "empty_shards": (F.conv1d, (2, 3, 3), (4, 3, 3), {"padding": 1}),
}


def over_space_only(rule: Rule, *dims: Shard) -> Rule:
    """A rule with nothing but its bodies over some dims of space."""

    def factorize(call: Any) -> Any:
        found = rule.factorize(call)
        blank = lambda tensors: tuple(((),) * len(dims) for dims in tensors)  # noqa: E731
        rows = tuple(row for row in found.rows if row.operands[0] in dims)
        return Factors(blank(found.operands), blank(found.results), {}, rows=rows)

    return attrs.evolve(rule, factorize=factorize)


MACHINE = spmd.Machine(flops=1e6, latency=0.0)
SPACE = {"rules": RULES | {op: over_space_only(RULES[op], Shard(2)) for op in CONVOLUTION}, "machine": MACHINE}
"""Has small convolutions sharded over space: arithmetic takes longer than communication."""
PLANE = {
    "rules": RULES | {op: over_space_only(RULES[op], Shard(2), Shard(3)) for op in CONVOLUTION},
    "machine": MACHINE,
}


both = pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])


def program(name: str, gradients: bool) -> tuple[Any, list[torch.Tensor]]:
    """The result of a convolution, with its gradients or without, and its arguments."""
    operator, image, weight, options = CASES[name]
    generator = torch.Generator().manual_seed(0)
    channels = operator(torch.zeros(image), torch.zeros(weight), **options).shape[1]
    shapes = (image, weight, (channels,))
    arguments = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def f(*arguments: torch.Tensor) -> Any:
        result, pull = torch.func.vjp(lambda *given: operator(*given, **options), *arguments)
        return result, *pull(result.sin())

    return f if gradients else lambda *given: operator(*given, **options), arguments


def assert_equal_results(expected: Any, actual: Any) -> None:
    for wanted, given in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        torch.testing.assert_close(given.full_tensor(), wanted)


def sharded_image(image: P, gradients: bool) -> tuple[Any, Any]:
    """The specs of arguments and results with the image sharded."""
    return (image, P(), P()), (image, image, P(), P()) if gradients else image


@pytest.mark.parametrize(
    ("name", "ranks", "gradients"),
    product([name for name in CASES if name not in ("few_columns", "large_and_transposed")], [2, 3, 4], [True, False]),
)
def test_space_is_sharded(name: str, ranks: int, gradients: bool) -> None:
    f, arguments = program(name, gradients)
    mesh = spmd.make_mesh({"x": ranks}, runtime="virtual")
    sharded = spmd.jit(f, *sharded_image(P(None, None, "x"), gradients), mesh=mesh, **SPACE)
    comms = sharded.plan(*arguments).comms
    inside = {comm.kind for comm in comms if "convolution" in comm.cause and "over a sharded dim" in comm.cause}
    far = name == "larger_than_a_shard" and ranks > 2
    assert ({"all_gather", "reduce_scatter"} if far and gradients else {"all_gather"} if far else {"permute"}) == inside
    assert ({"all_reduce"} if gradients else set()) == {
        comm.kind for comm in comms if "over a sharded dim" not in comm.cause
    }
    assert_equal_results(f(*arguments), sharded(*arguments))


@both
@pytest.mark.parametrize("spec", [P(None, None, ("y", "x")), P("x", None, "y")], ids=str)
@pytest.mark.parametrize("name", ["k3_s1_p1", "k3_s2", "transposed", "groups", "larger_than_a_shard", "empty_shards"])
def test_space_over_two_axes_and_beside_the_batch(name: str, spec: P, gradients: bool) -> None:
    f, arguments = program(name, gradients)
    mesh = spmd.make_mesh({"x": 2, "y": 3}, runtime="virtual")
    sharded = spmd.jit(f, *sharded_image(spec, gradients), mesh=mesh, **SPACE)
    assert_equal_results(f(*arguments), sharded(*arguments))


TWO_DIMS = ["k3_s1_p1", "k3_s2", "dilated", "transposed", "three_dims", "groups", "few_columns"]


@both
@pytest.mark.parametrize("spec", [P(None, None, "x", "y"), P(None, None, "y", "x")], ids=str)
@pytest.mark.parametrize("name", [*TWO_DIMS, "large", "large_and_transposed"])
def test_two_dims_of_space_over_two_axes(name: str, spec: P, gradients: bool) -> None:
    f, arguments = program(name, gradients)
    mesh = spmd.make_mesh({"x": 2, "y": 3}, runtime="virtual")
    sharded = spmd.jit(f, *sharded_image(spec, gradients), mesh=mesh, **PLANE)
    inside = {comm.axes for comm in sharded.plan(*arguments).comms if "over a sharded dim" in comm.cause}
    assert inside == {("x",), ("y",)} or not name.startswith("large")
    assert_equal_results(f(*arguments), sharded(*arguments))


def test_two_dims_of_space_exchange_borders_along_both_axes() -> None:
    f, arguments = wide("k3_s1_p1")
    mesh = spmd.make_mesh({"x": 4, "y": 2}, runtime="abstract")
    spec = P(None, None, "x", "y")
    plan = spmd.jit(f, (spec, P(), P()), spec, mesh=mesh).plan(*arguments)
    assert [("permute", ("x",))] * 2 + [("permute", ("y",))] * 2 == sorted((c.kind, c.axes) for c in plan.comms)
    assert max(comm.bytes for comm in plan.comms) <= 2 * 8 * 1026 * 4


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("kernel", [1, 3])
def test_gradients_that_nobody_reads(kernel: int, wanted: tuple[int, ...]) -> None:
    arguments = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 12), (4, 3, kernel), (4,))]
    f = torch.func.grad(lambda *given: F.conv1d(*given, stride=2).sin().sum(), argnums=wanted)
    mesh = spmd.make_mesh({"x": 3}, runtime="virtual")
    sharded = spmd.jit(f, (P(None, None, "x"), P(), P()), P(), mesh=mesh, **SPACE)
    assert_equal_results(f(*arguments), sharded(*arguments))


def wide(name: str) -> tuple[Any, list[Any]]:
    """A convolution that is large enough for the planner to shard over space."""
    operator, *_, options = CASES[name]
    shapes = [(1, 8, 4096, 64), (8, 8, 3, 3), (8,)]
    return lambda *given: operator(*given, **options), [spmd.TensorMeta(shape, torch.float32) for shape in shapes]


@pytest.mark.parametrize("name", ["k3_s1_p1", "k3_s2", "dilated", "transposed"])
def test_only_borders_are_exchanged(name: str) -> None:
    f, arguments = wide(name)
    mesh = spmd.make_mesh({"x": 4}, runtime="abstract")
    plan = spmd.jit(f, (P(None, None, "x"), P(), P()), P(None, None, "x"), mesh=mesh).plan(*arguments)
    assert {"permute"} == {comm.kind for comm in plan.comms}
    assert max(comm.bytes for comm in plan.comms) <= 2 * 8 * 64 * 4


def test_gradients_of_space_exchange_borders_and_sum_the_weight() -> None:
    f, arguments = wide("k3_s1_p1")

    def gradients(*arguments: torch.Tensor) -> Any:
        return torch.func.grad(lambda *given: f(*given).square().sum(), argnums=(0, 1, 2))(*arguments)

    image = P(None, None, "x")
    mesh = spmd.make_mesh({"x": 4}, runtime="abstract")
    plan = spmd.jit(gradients, (image, P(), P()), (image, P(), P()), mesh=mesh).plan(*arguments)
    assert {"permute", "all_reduce"} == {comm.kind for comm in plan.comms}


@pytest.mark.parametrize("image_spec", [P("x"), P(None, "x")])
def test_batch_and_groups_need_no_communication(image_spec: P) -> None:
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual")
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8, 16, 16), (16, 2, 3, 3)]
    image, weight = (torch.randn(shape, generator=generator) for shape in shapes)
    weight_spec = P() if image_spec == P("x") else P("x")

    def f(image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(image, weight, padding=1, groups=4)

    sharded = spmd.jit(f, (image_spec, weight_spec), image_spec, mesh=mesh)
    assert () == sharded.plan(image, weight).comms
    torch.testing.assert_close(sharded(image, weight).full_tensor(), f(image, weight))


@both
@pytest.mark.parametrize("transposed", [False, True])
def test_groups_on_one_axis_and_on_another_fewer_channels_than_ranks(transposed: bool, gradients: bool) -> None:
    """A rank that holds no channel of its groups holds weights of some groups all the same."""
    image, weight = (2, 4, 2, 3), (4, 2, 2, 2) if transposed else (2, 2, 2, 2)
    arguments = [torch.randn(shape, dtype=torch.float64) for shape in (image, weight)]
    operator = F.conv_transpose2d if transposed else F.conv2d
    mesh = spmd.make_mesh({"x": 2, "y": 3}, runtime="virtual")

    def f(*given: torch.Tensor) -> Any:
        result, pull = torch.func.vjp(lambda *given: operator(*given, groups=2), *given)
        return (result, *pull(result.sin())) if gradients else (result,)

    specs = (P(None, ("x", "y")), P("x", "y"))
    out_specs = (P("y"), *specs) if gradients else (P("y"),)
    slow = spmd.Machine(flops=1e9, memory_bandwidth=1e8, latency=0.0)
    assert_equal_results(f(*arguments), spmd.jit(f, specs, out_specs, mesh=mesh, machine=slow)(*arguments))


@pytest.mark.parametrize(
    "machine", [spmd.Machine(), spmd.Machine(flops=1e9, memory_bandwidth=1e8, latency=0.0)], ids=["", "slow"]
)
@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P(), P("x", "y")], ids=str)
def test_an_image_that_is_its_own_weight(spec: P, machine: spmd.Machine) -> None:
    mesh = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
    x = torch.randn(2, 2, 3, dtype=torch.float64)
    function = lambda x: F.conv_transpose1d(x, x, None, stride=2, groups=2, dilation=2)  # noqa: E731
    actual = spmd.jit(function, spec, P(), mesh=mesh, machine=machine)(x)
    torch.testing.assert_close(actual.full_tensor(), function(x))
