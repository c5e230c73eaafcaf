"""Donated buffers are written in place, and memory that anyone else can see is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import torch
from sampling import product
from torch import Tensor

import spmd
from spmd import P
from spmd.ir.in_place import in_place_variant
from spmd.optim import AdamWState, adamw, sgd
from spmd.testing.live import peak_bytes

aten = torch.ops.aten
ONE = spmd.make_mesh({"x": 1}, runtime="virtual")
LINE = spmd.make_mesh({"x": 2}, runtime="virtual")
GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")


def values(*shape: int) -> Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)


def place(tensor: Tensor, spec: P = P("x"), mesh: spmd.Mesh = LINE) -> spmd.DTensor:  # noqa: B008
    return spmd.distribute(tensor, spec, mesh)


def pointers(value: spmd.DTensor) -> list[int]:
    return [shard.data_ptr() for shard in value.shards]


def specs_of(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.spec.pspec, tree)


def run(function: Callable[..., Any], *args: Any, mesh: spmd.Mesh = LINE, out: Any = None) -> Any:
    """The result of a function whose first argument is donated."""
    return spmd.jit(function, specs_of(args), out, mesh=mesh, donate_argnums=0)(*args)


def test_a_donated_shard_becomes_the_result() -> None:
    x = place(values(6, 2))
    before = pointers(x)
    y = run(lambda x: (x * 2 + 1).relu(), x)
    assert before == pointers(y)
    assert torch.equal(y.full_tensor(), values(6, 2) * 2 + 1)


def test_a_list_of_donated_shards() -> None:
    xs = [place(values(6)), place(values(4, 2))]
    before = [pointers(x) for x in xs]
    ys = run(lambda xs: torch._foreach_add(torch._foreach_mul(xs, 2.0), xs[::-1][:0] or [1.0, 2.0]), xs)
    assert before == [pointers(y) for y in ys]
    assert torch.equal(ys[1].full_tensor(), values(4, 2) * 2 + 2)


OPTIMIZERS = {"adamw": adamw(0.1, weight_decay=0.1), "momentum": sgd(0.1, 0.9), "sgd": sgd(0.1)}
PLACES = [(LINE, P("x")), (GRID, P("x", "y")), (GRID, P(("x", "y"))), (GRID, P("y"))]


@pytest.mark.parametrize(("name", "at", "shape"), product(OPTIMIZERS, PLACES, [(4, 3), (5, 3), (1, 3), (0, 3)]))
def test_steps_with_and_without_donation_agree(name: str, at: tuple[spmd.Mesh, P], shape: tuple[int, ...]) -> None:
    optimizer, (mesh, spec) = OPTIMIZERS[name], at
    params = {"w": torch.randn(shape), "v": torch.randn(shape)}
    state, grads = optimizer.init(params), {"w": torch.randn(shape), "v": torch.randn(shape)}
    specs = optree.tree_map(lambda x: spec if x.ndim else P(), (params, state))

    def train(donate: Any) -> list[Tensor]:
        step = spmd.jit(optimizer.step, (*specs, spec), specs, mesh=mesh, donate_argnums=donate)
        found = spmd.distribute((params, state), specs, mesh)
        slopes = spmd.distribute(grads, spec, mesh)
        for _ in range(3):
            found = step(*found, slopes)
        return [leaf.full_tensor() for leaf in optree.tree_leaves(found)]

    mine, kept = train((0, 1)), train(())
    assert all(map(torch.equal, mine, kept))
    expected = params, state
    for _ in range(3):
        expected = optimizer.step(*expected, grads)
    torch.testing.assert_close(mine, optree.tree_leaves(expected))


def test_what_the_caller_holds_is_not_written() -> None:
    x = place(values(4))
    held = x.shards[0]
    other = x.shards[1].view(2, 1)
    y = run(lambda x: x + 1, x)
    assert torch.equal(held, torch.tensor([1.0, 2.0])) and torch.equal(other.flatten(), torch.tensor([3.0, 4.0]))
    assert torch.equal(y.full_tensor(), values(4) + 1)


def test_replicas_that_are_one_tensor() -> None:
    def replicas() -> spmd.DTensor:
        return spmd.DTensor.from_local([values(4)] * 2, LINE, P())

    for _ in range(2):
        assert all(torch.equal(shard, values(4) + 1) for shard in run(lambda x: x + 1, replicas(), out=P()).shards)
        y = run(lambda x: (x + x.sum()).cumsum(0), replicas(), out=P())
        assert all(torch.equal(shard, (values(4) + 10).cumsum(0)) for shard in y.shards)


def test_the_same_value_donated_and_not() -> None:
    x = place(values(4))
    for donate in (0, 1):
        first, second = x.detach(), x.detach()
        y, z = spmd.jit(lambda a, b: (a + 1, b * 2), P("x"), None, mesh=LINE, donate_argnums=donate)(first, second)
        assert torch.equal(y.full_tensor(), values(4) + 1) and torch.equal(z.full_tensor(), values(4) * 2)
    assert torch.equal(x.full_tensor(), values(4))


def test_a_donated_value_twice() -> None:
    x = place(values(4))
    a, b = run(lambda pair: (pair[0] + 1, pair[1] * 2), (x, x.detach()))
    assert torch.equal(a.full_tensor(), values(4) + 1) and torch.equal(b.full_tensor(), values(4) * 2)


def later_view(x: Tensor) -> Any:
    view = x[:, 1:]
    return x + 1, view * 2


def earlier_view_is_returned(x: Tensor) -> Any:
    return x.t(), x * 3


def read_later(x: Tensor) -> Any:
    return x * 2, x.cos() + x.sum()


def returned(x: Tensor) -> Any:
    return x, x + 1


def with_itself(x: Tensor) -> Any:
    return x * x, (x * x).exp()


def with_a_view_of_itself(x: Tensor) -> Any:
    return (x + x.view(2, 8).view(4, 4).t(),)


def expanded(x: Tensor) -> Any:
    return (x[:, :1].expand(4, 4) + 1, x.relu())


def chained(x: Tensor) -> Any:
    y = x + 1
    z = y.view(-1)
    return y * 2, z - 1


@pytest.mark.parametrize("spec", [P("x"), P(), P(None, "x")])
@pytest.mark.parametrize(
    "function",
    [later_view, earlier_view_is_returned, read_later, returned, with_itself, with_a_view_of_itself, expanded, chained],
)
def test_aliases_inside_of_a_program(function: Callable[[Tensor], Any], spec: P) -> None:
    expected = function(values(4, 4))
    step = spmd.jit(function, spec, None, mesh=LINE, donate_argnums=0)
    for _ in range(2):
        for mine, theirs in zip(step(place(values(4, 4), spec)), expected, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)


def test_results_that_are_views_of_each_other() -> None:
    """Both results of the first call have the memory of one shard; the second call gets one of them."""
    split = spmd.jit(lambda x: (x.view(2, 2), x.view(4)), P(), P(), mesh=LINE)
    a, b = split(place(values(4), P()))
    c = run(lambda a: a + 1, a)
    assert torch.equal(b.full_tensor(), values(4)) and torch.equal(c.full_tensor(), values(2, 2) + 1)


def test_memory_of_others() -> None:
    """Memory of numpy, part of a larger tensor, a tensor with gaps or overlaps, and memory that processes share."""
    array = np.ones((2, 2), dtype=np.float32)
    whole = torch.ones(4, 2)
    cases = {
        "numpy": (torch.from_numpy(array), lambda: torch.from_numpy(array)),
        "part": (whole[:2], lambda: whole[:2]),
        "overlap": (torch.ones(1).expand(2, 2), lambda: None),
        "transposed": (torch.ones(2, 2).t(), lambda: None),
        "shared": (torch.ones(2, 2).share_memory_(), lambda: None),
    }
    for name, (tensor, kept) in cases.items():
        x = spmd.DTensor.from_local([tensor], ONE, P())
        again = tensor if name == "shared" else None
        del tensor
        y = run(lambda x: x + 1, x, mesh=ONE)
        assert torch.equal(y.full_tensor(), torch.full((2, 2), 2.0)), name
        for old in (kept(), again):
            assert old is None or torch.equal(old, torch.ones(2, 2)), name


def test_constants_are_not_written() -> None:
    table = torch.ones(4)
    step = spmd.jit(lambda x: (x + table, table * 2), P("x"), None, mesh=LINE, donate_argnums=0)
    for _ in range(2):
        y, z = step(place(values(4)))
        assert torch.equal(y.full_tensor(), values(4) + 1) and torch.equal(z.full_tensor(), torch.full((4,), 2.0))


def test_saved_by_autograd() -> None:
    shard, w = torch.ones(2), torch.ones(2, requires_grad=True)
    product = (w * shard).sum()
    x = spmd.DTensor.from_local([shard], ONE, P())
    del shard
    run(lambda x: x + 1, x, mesh=ONE)
    product.backward()
    assert torch.equal(w.grad, torch.ones(2))  # type: ignore[arg-type]


def test_fused_operators_take_any_strides() -> None:
    optimizer = adamw(0.1, weight_decay=0.1)
    step = spmd.jit(optimizer.step, P(), None, mesh=ONE, donate_argnums=(0, 1))
    drawn = torch.randn(3, 4)
    state = optimizer.init([drawn])
    expected = optimizer.step([drawn], state, [drawn.cos()])

    def transposed(x: Tensor) -> spmd.DTensor:
        return spmd.DTensor.from_local([x.t().contiguous().t() if x.ndim else x], ONE, P())

    args = optree.tree_map(transposed, ([drawn], state, [drawn.cos()]))
    found = optree.tree_leaves(step(*args))
    torch.testing.assert_close([x.full_tensor() for x in found], optree.tree_leaves(expected))


def test_a_step_allocates_nothing() -> None:
    optimizer = adamw(0.1)
    params = [torch.ones(8, 8), torch.ones(8)]
    step = spmd.jit(optimizer.step, P(), P(), mesh=LINE, donate_argnums=(0, 1))
    args = params, optimizer.init(params), params
    plan = step.plan(*args)
    held = (
        4 * (64 + 8) * 4 + 8 + 8 + 4
    )  # parameters, two states, gradients; the number of steps, as float64, as float32
    assert held == plan.memory.peak == peak_bytes(step.lower(*args), plan.request.donated)
    kept = spmd.jit(optimizer.step, P(), P(), mesh=LINE)
    assert (
        kept.plan(*args).memory.peak == peak_bytes(kept.lower(*args)) == 4 * (64 + 8) * 4 + 3 * (64 + 8) * 4 + 8 + 8 + 4
    )


def test_programs_show_what_is_written() -> None:
    step = spmd.jit(lambda x, y: (x + y, y * 2), P("x"), P("x"), mesh=LINE, donate_argnums=0)
    lines = step.lower(torch.ones(4), torch.ones(4)).as_text().splitlines()
    assert ["    add_1 = add_(x, y)  # f32[2] P('x')", "    mul_1 = mul(y, 2)  # f32[2] P('x')"] == lines[5:7]


def test_programs_for_other_tools_write_nothing() -> None:
    optimizer = adamw(0.1, weight_decay=0.1)
    args = [values(4)], optimizer.init([values(4)]), [values(4).sin()]
    step = spmd.jit(optimizer.step, P(), P(), mesh=LINE, donate_argnums=(0, 1))
    leaves = optree.tree_leaves(args)
    found = step.lower(*args).graph_module()(*leaves)
    torch.testing.assert_close(list(found), optree.tree_leaves(optimizer.step(*args)))
    assert torch.equal(leaves[0], values(4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 2.0**x, lambda x: 1.0 - x, lambda x: x**2, lambda x: torch.lerp(x, x + 1, 0.3),
        lambda x: aten._foreach_pow.ScalarAndTensor(2.0, [x, x + 1])[1], lambda x: x.clamp(2, 3),
        lambda x: torch.where(x > 2, x, 0.0), lambda x: x.double() + x, lambda x: x.masked_fill(x > 2, 0.0),
        lambda x: x.add(x.sum(), alpha=2), lambda x: x.to(torch.int64) + 1, lambda x: torch.addcmul(x, x + 1, x + 2),
        lambda x: x.sub(1).div(3, rounding_mode="floor"), lambda x: x.atan2(torch.ones(3, 1)), lambda x: x.mul(True),
    ],
)  # fmt: skip
def test_values_of_operators_in_place(function: Callable[[Tensor], Tensor]) -> None:
    step = spmd.jit(function, P("x"), None, mesh=LINE, donate_argnums=0)
    torch.testing.assert_close(step(place(values(4))).full_tensor(), function(values(4)))
    assert peak_bytes(step.lower(values(4)), frozenset([0])) == step.plan(values(4)).memory.peak


def test_operators_with_in_place_variants() -> None:
    assert aten.add_.Tensor is in_place_variant(aten.add.Tensor)
    assert aten._fused_adamw_.default is in_place_variant(aten._fused_adamw.default)
    assert None is in_place_variant(aten.mm.default) is in_place_variant(aten.add_.Tensor)
    assert None is in_place_variant(aten._to_copy.default) is in_place_variant(aten.where.self)
    assert None is in_place_variant(aten.pow.Scalar)  # its first argument is a number, that of `pow_.Scalar` is not


@pytest.mark.parametrize("mesh", [ONE, LINE], ids=str)
@pytest.mark.parametrize(
    "hold",
    [
        lambda shard: shard,
        lambda shard: shard.view(-1),
        lambda shard: shard.detach(),
        lambda shard: shard.numpy(),
        lambda shard: torch.zeros(2).set_(shard),
    ],
    ids=["shard", "view", "detached", "numpy", "set_"],
)
def test_what_the_caller_holds_of_a_later_step_is_not_written(hold: Callable[[Tensor], Any], mesh: spmd.Mesh) -> None:
    optimizer = adamw(lr=0.1)
    plain = values(6), optimizer.init(values(6))
    specs = P("x"), AdamWState(P(), P("x"), P("x"))
    update = spmd.jit(optimizer.step, (*specs, P("x")), specs, mesh=mesh, donate_argnums=(0, 1))
    params, state = spmd.distribute(plain, specs, mesh)
    grads = place(values(6), mesh=mesh)
    for number in range(6):
        plain = optimizer.step(*plain, values(6))
        held = hold(params.shards[0]) if number % 2 else None
        before = None if held is None else torch.as_tensor(held).clone()
        params, state = update(params, state, grads)
        torch.testing.assert_close(params.full_tensor(), plain[0])
        assert before is None or torch.equal(torch.as_tensor(held), before)
