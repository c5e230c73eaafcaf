"""`scan`, `map` and `associative_scan`, where JAX has tests of its own loops and branches."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from compared_calls import THREE, assert_close, check, check_derivatives, loss, program, scan_by_hand
from manual_cases import GRID, LINE, arange, assert_same, randn
from sampling import product, sample
from torch import Tensor
from torch.func import grad, jacfwd, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import P, collectives


def by_checkpoint(f: Any, init: Any, xs: Any, **options: Any) -> Any:
    return checkpoint(lambda init, xs: spmd.scan(f, init, xs, **options), init, xs, use_reentrant=False)


SCANS = {
    "scan": spmd.scan,
    "all trips unrolled": lambda f, init, xs, **options: spmd.scan(f, init, xs, unroll=0, **options),
    "unrolled by two": lambda f, init, xs, **options: spmd.scan(f, init, xs, unroll=2, **options),
    "checkpoint": by_checkpoint,
}
scans = pytest.mark.parametrize("scan", sample(SCANS.values(), [spmd.scan]))
CLOSED = randn(2)


def trip(c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    b = torch.cos(a.sin().sum() + c.cos().sum() + CLOSED.sum())
    return torch.sin(c * b), b


def by_hand(c: Tensor, xs: Tensor) -> Any:
    return scan_by_hand(trip, c, xs)


ROWS = (P("x"), P(None, "y"))
"""The carry and the rows, which are sharded along dim 1."""


@pytest.mark.parametrize("scan, jitted_body", product(SCANS.values(), (False, True)))
def test_values(scan: Any, jitted_body: bool) -> None:
    body = spmd.jit(trip, mesh=GRID) if jitted_body else trip
    f = lambda c, xs: scan(body, c, xs)  # noqa: E731
    c, xs = randn(4), randn(5, 3)
    assert_same(program(f, c, xs, mesh=GRID, specs=ROWS), by_hand(c, xs))
    if not jitted_body:
        assert_same(f(c, xs), by_hand(c, xs))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("scan", sample(SCANS.values(), [spmd.scan]))
def test_derivatives(scan: Any, reverse: bool) -> None:
    f = lambda c, xs: scan(trip, c, xs)  # noqa: E731
    check_derivatives(f, by_hand, randn(4), randn(3, 3), reverse=reverse and scan is not by_checkpoint, specs=ROWS)


@pytest.mark.slow
def test_second_derivatives() -> None:
    f = lambda c, xs: spmd.scan(trip, c, xs)  # noqa: E731
    check_derivatives(f, by_hand, randn(4), randn(3, 3), twice=True, specs=ROWS)


def test_gradients_of_a_checkpointed_scan() -> None:
    f = lambda c, xs: loss(by_checkpoint(trip, c, xs))  # noqa: E731
    wanted = grad(lambda c, xs: loss(by_hand(c, xs)), (0, 1))
    c, xs = randn(4), randn(5, 3)
    assert_same(program(grad(f, (0, 1)), c, xs, mesh=GRID, specs=ROWS), wanted(c, xs))


@pytest.mark.parametrize("scan", sample(SCANS.values(), [spmd.scan, by_checkpoint]))
def test_linearize(scan: Any) -> None:
    f = lambda c, xs: linearize(lambda *x: scan(trip, *x), c, xs)[1](c, xs)  # noqa: E731
    c, xs = randn(4), randn(5, 3)
    assert_same(program(f, c, xs, mesh=GRID, specs=ROWS), jvp(by_hand, (c, xs), (c, xs))[1])


def test_a_recurrent_network() -> None:
    def step(params: Any, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        stacked = torch.cat([state, x])
        return torch.tanh(params[0] @ stacked), torch.tanh(params[1] @ stacked)

    def loss_by(loop: Any, w: Tensor, out: Tensor, xs: Tensor, targets: Tensor) -> Tensor:
        ys = loop(lambda h, x: step((w, out), h, x), torch.zeros(2, dtype=w.dtype), xs)[1]
        return (ys - targets).square().sum()

    args = randn(2, 6), randn(1, 6), randn(3, 4), randn(3, 1)
    specs = P(None, "x"), P(), P(), P()
    ours, wanted = (lambda *x, loop=loop: loss_by(loop, *x) for loop in (spmd.scan, scan_by_hand))
    check_derivatives(ours, wanted, *args, specs=specs)
    assert_same(program(lambda *x: linearize(ours, *x)[1](*x), *args), jvp(wanted, args, args)[1])
    batch = args[0], args[1], randn(7, 3, 4), randn(7, 3, 1)
    dims = (None, None, 0, 0)
    each = torch.stack([wanted(*args[:2], x, y) for x, y in zip(batch[2], batch[3], strict=True)])
    check(vmap(ours, dims), each, *batch, specs=(P(), P(), P("x"), P("x")))


@pytest.mark.parametrize("scan", sample(SCANS.values(), [spmd.scan, by_checkpoint]))
def test_a_gradient_in_a_trip(scan: Any) -> None:
    def minimized(force: Tensor) -> Tensor:
        def descend(carry: Any, x: Tensor) -> Any:
            i, place = carry
            return (i + 1, place - 0.1 * grad(lambda p: (p * force).sum())(place)), x

        start = torch.tensor(0), torch.tensor([1.0, 2.0, 3.0])
        return scan(descend, start, torch.zeros(15, 0))[0][1]  # type: ignore[no-any-return]

    force = torch.tensor(0.5)
    wanted = torch.tensor([1.0, 2.0, 3.0]) - 1.5 * force
    assert_close(program(minimized, force), wanted)
    if scan is not by_checkpoint:
        slope = grad(lambda force: (1 - minimized(force)).sin().sum())
        check(slope, (1.5 * (1 - wanted).cos()).sum(), force)


@pytest.mark.parametrize("scan", sample(SCANS.values(), [spmd.scan]))
def test_second_derivatives_of_numbers(scan: Any) -> None:
    def body(c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return 0.9 * torch.cos(0.75 * torch.sin(c * a).sum()), torch.sin(c * torch.cos(0.75 * a).sum())

    def twice(loop: Any) -> Any:
        slopes = grad(lambda *x: loss(loop(body, *x)), (0, 1))
        return grad(lambda *x: loss(slopes(*x)), (0, 1))

    c, xs = torch.tensor(1.0, dtype=torch.float64), arange(3, 2)
    assert_same(program(twice(scan), c, xs, mesh=GRID), twice(scan_by_hand)(c, xs))


DIMS = [(c, xs) for c in (None, 0, 1) for xs in (None, 0, 1, 2) if (c, xs) != (None, None)]


@pytest.mark.parametrize("scan, dims", product(list(SCANS.values())[:3], DIMS))
def test_batches(dims: tuple[int | None, int | None], scan: Any) -> None:
    shapes = [[4], [5, 3]]
    for shape, dim in zip(shapes, dims, strict=True):
        if dim is not None:
            shape.insert(dim, 7)
    c, xs = (randn(*shape) for shape in shapes)
    check(vmap(lambda *x: scan(trip, *x), dims), vmap(by_hand, dims), c, xs, mesh=GRID)


def test_batches_of_trees() -> None:
    def body(c: Any, a: Any) -> Any:
        b = a[0].cos().sum() * (c[1] * a[1]).sum()
        return (c[0] * torch.sin((a[0] * a[1].sum()).sum()), c[1] * a[0].sum().cos()), b

    c, xs = (randn(7, 2), randn(7)), (randn(3, 7), randn(3, 4, 7))
    found = vmap(lambda c, xs: spmd.scan(body, c, xs), (0, (1, 2)))
    wanted = vmap(lambda c, xs: scan_by_hand(body, c, xs), (0, (1, 2)))
    flat = lambda f: lambda a, b, x, y: f((a, b), (x, y))  # noqa: E731
    check(flat(found), flat(wanted), *c, *xs)


@scans
def test_a_batch_that_moves_along_the_carry(scan: Any) -> None:
    def f(last: Tensor) -> Any:
        start = (*(torch.tensor(float(n)) for n in range(3)), last)
        return scan(lambda c, x: ((*c[1:], torch.tensor(0.0)), x), start, torch.zeros(2))[0]

    last = torch.tensor([3.0, 4.0, 5.0])
    assert_close(program(vmap(f), last), (torch.full((3,), 2.0), last, torch.zeros(3), torch.zeros(3)))


def test_a_derivative_of_gradients() -> None:
    def f(x: Tensor) -> Tensor:
        return spmd.scan(lambda x, i: (grad(torch.cos)(x), i), x, torch.arange(4))[0]

    x = torch.tensor(0.5)
    check(jacfwd(f), lambda x: jacfwd(lambda x: -(-(-(-x.sin()).sin()).sin()).sin())(x), x)


def test_collectives_in_a_scan() -> None:
    def body(xs: Tensor) -> Any:
        last, sums = spmd.scan(lambda c, x: (c + collectives.psum(x, "x"), c), 0.0, xs[0])
        return last, sums

    f = spmd.shard_map(body, LINE, P("x"), (P(), P()))
    for call in (f, spmd.jit(f, P("x"), mesh=LINE)):
        assert_close(call(spmd.distribute(torch.ones(4, 3), P("x"), LINE)), (12.0, torch.tensor([0.0, 4.0, 8.0])))


def test_collectives_of_the_carry() -> None:
    def body(state: Tensor, xs: Tensor) -> Any:
        def trip(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return c, collectives.psum(c, "x") * x

        last, ys = spmd.scan(trip, state[0], xs[0])
        return last[None], ys[None]

    f = spmd.shard_map(body, LINE, (P("x"), P("x")), (P("x"), P("x")))
    args = torch.ones(4), torch.arange(20.0).view(4, 5)
    for call in (f, spmd.jit(f, (P("x"), P("x")), mesh=LINE)):
        assert_close(call(*(spmd.distribute(x, P("x"), LINE) for x in args)), (args[0], 4 * args[1]))


def test_the_size_of_an_axis_is_that_of_the_mesh_at_hand() -> None:
    for size in (2, 3):
        mesh = spmd.make_mesh({"x": size}, runtime="virtual")
        f = spmd.shard_map(
            lambda x: spmd.scan(lambda c, _: (c + collectives.axis_size("x"), None), x, None, length=1)[0],
            mesh, P("x"), P("x"),
        )  # fmt: skip
        assert_close(spmd.jit(f, P("x"), mesh=mesh)(torch.zeros(size)), torch.full((size,), float(size)))


def test_map() -> None:
    check(lambda xs: spmd.map(lambda x: x**2, xs), torch.arange(10) ** 2, torch.arange(10))
    check(lambda xs: spmd.map(lambda x: x * x, xs), torch.zeros(0), torch.zeros(0))


def test_a_length_without_rows() -> None:
    check(lambda: spmd.scan(lambda c, _: (c + 1, c), 0, None, length=10), (10, torch.arange(10)))
    check(lambda: spmd.scan(lambda c, _: (c + 1, None), 0, length=20)[0], 20)


def test_a_key_beside_what_is_differentiated() -> None:
    def f(c: Tensor, key: Tensor) -> Tensor:
        return spmd.scan(lambda state, _: ((state[0], state[1] * 5 + 1), ()), (c, key), torch.ones(3))[0][0]

    check(grad(f), 1.0, torch.tensor(0.0), torch.tensor(7))


def test_a_carry_that_is_a_number() -> None:
    def f(x: Tensor) -> Tensor:
        return spmd.scan(lambda state, _: ((2 * state[0], 0.0), None), (x, 0.0), torch.arange(3))[0][0]

    check(grad(f), 8.0, torch.tensor(0.0))


@scans
@pytest.mark.parametrize("reverse", [False, True])
def test_sums_from_either_end(scan: Any, reverse: bool) -> None:
    def f(xs: Tensor) -> Any:
        return scan(lambda c, x: (c + x, c + x), torch.tensor(0), xs, reverse=reverse)[1]

    xs = torch.tensor([3, 1, 4, 1, 5, 9])
    wanted = xs.flip(0).cumsum(0).flip(0) if reverse else xs.cumsum(0)
    assert_same(program(f, xs), wanted)
    with spmd.disable_jit():
        assert_same(program(f, xs), wanted)


def test_unrolled_programs_are_longer() -> None:
    c, xs = randn(4), randn(20, 3)
    texts = []
    for unroll in (1, 2, True):
        f = lambda c, xs, unroll=unroll: spmd.scan(trip, c, xs, unroll=unroll)  # noqa: E731
        texts.append(spmd.jit(f, (P(), P()), mesh=THREE).lower(c, xs).as_text())
    assert len(texts[0]) < len(texts[1]) < len(texts[2])
    assert [True, True, False] == ["for loop" in text for text in texts]


SHAPES = [[0], [1], [2], [5], [10], [1000], [2, 3], [7, 5], [5, 6, 7]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_associative_sums(shape: list[int]) -> None:
    x = torch.arange(torch.Size(shape).numel()).reshape(shape) + 7
    for dim in range(-len(shape), len(shape)):
        assert_same(spmd.associative_scan(torch.add, x, dim=dim), x.cumsum(dim))
    if len(x) < 1000:
        assert_same(program(lambda x: spmd.associative_scan(torch.add, x, dim=-1), x), x.cumsum(-1))


def test_associative_sums_from_the_end() -> None:
    x = torch.arange(1000) + 32
    assert_same(spmd.associative_scan(torch.add, x, reverse=True), x.flip(0).cumsum(0).flip(0))
    x = x[:20]
    check(lambda x: spmd.associative_scan(torch.add, x, reverse=True), x.flip(0).cumsum(0).flip(0), x)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_associative_scan_of_a_tree() -> None:
    def f(first: Tensor, second: Tensor) -> Any:
        def add(a: Pair, b: Pair) -> Pair:
            return Pair(a.first + b.first, a.second + b.second)

        return tuple(spmd.associative_scan(add, Pair(first, second)))

    x = torch.arange(3.0)
    check(f, (x.cumsum(0), 10 * x.cumsum(0)), x, 10 * x)


def test_associative_scan_of_bools() -> None:
    x = torch.tensor([False, True, True, True, False, True])
    check(lambda x: spmd.associative_scan(torch.logical_xor, x), x.cumsum(0) % 2 == 1, x)


@pytest.mark.parametrize("length", sample([2, 43], [2]))
def test_associative_scan_of_a_batched_solver(length: int) -> None:
    def fn(a: Any, b: Any) -> Any:
        return a[0] + b[0], torch.linalg.solve(a[0], b[1]) + torch.linalg.solve(b[0], a[1])

    matrices, vectors = torch.eye(2).repeat(length, 1, 1), torch.ones(length, 2)
    f = lambda *x: spmd.associative_scan(vmap(fn), x)  # noqa: E731
    found = f(matrices, vectors)
    assert_same(found[0], torch.eye(2) * torch.arange(1.0, length + 1)[:, None, None])
    assert_same(program(f, matrices, vectors), found)


def test_a_number_is_a_tensor_of_the_default_dtype_of_its_kind() -> None:
    x = torch.ones(5, dtype=torch.int8)
    check(lambda x: spmd.scan(lambda c, x: (c + x, x), 0, x), (5, x), x)  # of JAX the sum is an int8


@pytest.mark.parametrize("again", [False, True])
def test_rows_that_a_gradient_reads_are_not_stacked_again(again: bool) -> None:
    def products(x: Tensor) -> Any:
        start = torch.ones(2, 6, dtype=x.dtype)
        return spmd.scan(lambda s, x: (x * s, s), start, x)

    f = (lambda x: checkpoint(products, x, use_reentrant=False)) if again else products
    x = randn(3, 2, 6)
    jitted = spmd.jit(grad(lambda x: loss(f(x))), P(None, "x"), mesh=GRID)
    assert_same(jitted(x), grad(lambda x: loss(scan_by_hand(lambda s, x: (x * s, s), torch.ones(2, 6).double(), x)))(x))
    if not again:
        assert "stack(item" not in jitted.lower(x).as_text()


@pytest.mark.parametrize("scan", sample(SCANS.values(), [spmd.scan, by_checkpoint]))
def test_products_with_what_is_closed_over(scan: Any) -> None:
    first, second = arange(2, 2), arange(2, 2) + 1

    def by(loop: Any, x: Tensor) -> Tensor:
        def trip(c: Any, y: Tensor) -> Any:
            return (first @ c[0], second @ c[1], second.sin() @ c[2]), y

        start = (x * torch.ones(2).double(),) * 3
        return sum(c.sum() for c in loop(trip, start, torch.zeros(3))[0])  # type: ignore[return-value]

    x = torch.tensor(1.0, dtype=torch.float64)
    assert_same(program(grad(lambda x: by(scan, x)), x), grad(lambda x: by(scan_by_hand, x))(x))


def permuted(seed: int, size: int) -> tuple[list[int], list[int]]:
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    return order, [order.index(n) for n in range(size)]


@pytest.mark.parametrize("seed", sample(range(3), [2]))
def test_carries_that_move_among_each_other(seed: int) -> None:
    order, back = permuted(seed, 6)
    constants = [randn(3) for _ in range(seed)]

    def body(c: Any, _: Any) -> Any:
        c = [c[n] for n in back]
        made = [x.sin() * sum((k.sum() for k in constants), 1.0) for x in c[seed + 1 :]]
        after = [*c[: seed + 1], *made]
        return [after[n] for n in order], [0, 0]

    def f(init: Tensor, xs: Tensor) -> Any:
        return spmd.scan(body, list(init.unbind()), [xs, xs])[0]

    def wanted(init: Tensor, _: Tensor) -> Any:
        return body(body(list(init.unbind()), None)[0], None)[0]

    check(f, wanted, randn(6), arange(2))
    check(grad(lambda *x: loss(f(*x))), grad(lambda *x: loss(wanted(*x))), randn(6), arange(2))


@pytest.mark.parametrize("seed", sample(range(3), [1]))
def test_rows_and_carries_that_are_returned_as_they_are(seed: int) -> None:
    order, back = permuted(seed, 5)
    constants = [randn(3) for _ in range(seed)]

    def body(c: Any, x: Any) -> Any:
        c = [c[n] for n in back]
        factor = sum((k.sum() for k in constants), 1.0)
        after = [*c[:seed], *(value.sin() * factor * x[0].cos() for value in c[seed:])]
        ys = [*x[:seed], *(value.cos() * factor for value in x[seed:]), c[0]]
        return [after[n] for n in order], torch.stack(ys)

    def by(loop: Any, init: Tensor, xs: Tensor) -> Any:
        return loop(body, list(init.unbind()), tuple(xs.unbind()))

    init, xs = randn(5), randn(3, 2)
    ours, wanted = (lambda *x, loop=loop: by(loop, *x) for loop in (spmd.scan, scan_by_hand))
    found = program(ours, init, xs, specs=(P(), P()))
    assert_close(found, wanted(init, xs))
    both = lambda f: lambda *x: vjp(f, *x)[1](f(*x))  # noqa: E731
    check(both(ours), both(wanted), init, xs, specs=(P(), P()))


def test_prints_of_a_loop_that_is_differentiated(capfd: pytest.CaptureFixture[str]) -> None:
    def trip(c: Tensor, _: None) -> Any:
        spmd.debug.print("c = {}", c)
        return c + 1, None

    f = spmd.jit(torch.func.grad_and_value(lambda x: spmd.scan(trip, x, length=2)[0]), P(), mesh=THREE)
    assert_close(f(torch.tensor(1.0)), (1.0, 3.0))
    first = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[rank 0]")]
    assert ["[rank 0] c = 1.0", "[rank 0] c = 2.0"] == first, "once in each trip"


def test_a_carry_that_becomes_constant() -> None:
    f = lambda x: sum(spmd.scan(lambda c, _: ((0.0, 0.0), ()), (x, 0.0), (), length=5)[0])  # noqa: E731
    check(grad(f), 0.0, torch.tensor(1.0))
