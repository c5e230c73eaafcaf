"""Loops by conditions and over ranges, where JAX has tests of its own loops and branches."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from compared_calls import THREE, check, check_derivatives, program, while_by_hand
from manual_cases import GRID, LINE, PAIR, arange, assert_same, randn, whole
from torch import Tensor
from torch.func import grad, jvp, linearize, vmap
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import P, collectives


def number(value: float, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def steps_to_ten(start: Any) -> Any:
    """How many steps of one lead from a number to ten."""
    return spmd.while_loop(lambda s: s[0] < 10, lambda s: (s[0] + 1, s[1] + 1), (start, 0))[1]


@pytest.mark.parametrize("start", [2, 3, 12])
def test_a_pair_of_a_number_and_a_count(start: int) -> None:
    check(steps_to_ten, max(10 - start, 0), number(start))


def test_many_values() -> None:
    def f(count: int) -> Any:
        return spmd.while_loop(lambda s: s[0] < 2, lambda s: tuple(x + 1 for x in s), (0,) * count)

    assert_same(f(256), (number(2),) * 256)
    assert_same(program(lambda: f(24)), (number(2),) * 24)


def test_a_loop_in_a_loop() -> None:
    def inner(i: Tensor, count: Tensor) -> Tensor:
        return spmd.while_loop(lambda s: s[0] <= i, lambda s: (s[0] + 1, s[1] + 1), (0, count))[1]

    def f(n: Tensor) -> Any:
        return spmd.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, inner(s[0], s[1])), (0, 0))

    jitted = spmd.jit(f, mesh=THREE)
    for n in (2, 3, 4):
        assert_same(f(number(n)), (number(n), number(n * (n + 1) // 2)))
        assert_same(jitted(number(n)), (number(n), number(n * (n + 1) // 2)))


@pytest.mark.parametrize("nested", [False, True])
def test_a_program_with_a_loop_is_traced_once(nested: bool) -> None:
    traces = []

    def one_more(position: Any, count: Any, step: Any) -> Any:
        return position + 1, count + step

    step_on = spmd.jit(one_more, mesh=THREE) if nested else one_more

    def f(start: Any, limit: Any, step: Any) -> Any:
        def body(state: Any) -> Any:
            traces.append(1)
            return step_on(*state, step)

        return spmd.while_loop(lambda s: s[0] < limit, body, (start, 0))[1]

    jitted = spmd.jit(f, mesh=THREE)
    assert_same(jitted(number(2), number(10), number(1)), number(8))
    count = len(traces)
    assert count > 0
    assert_same(jitted(number(3), number(10), number(2)), number(14))
    assert count == len(traces)


def test_a_node_of_the_users() -> None:
    @attrs.define
    class Node:
        x: Any
        y: Any

    register_pytree_node(Node, lambda node: ([node.x, node.y], "aux"), lambda leaves, _: Node(*leaves))

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        last = spmd.while_loop(lambda n: n.x > 0, lambda n: Node(n.x - 1, n.y * 2), Node(x, x))
        return last.x, last.y

    check(f, (0.0, 24.0), torch.tensor(3.0))


def test_entries_below_the_diagonal_one_by_one() -> None:
    def write(out: Tensor, value: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return out.index_put((i, j), value)

    def inner(i: Tensor, x: Tensor, out: Tensor) -> Tensor:
        return spmd.while_loop(lambda s: s[0] <= i, lambda s: (s[0] + 1, write(s[1], x[i, s[0]], i, s[0])), (0, out))[1]

    def f(x: Tensor) -> Any:
        start = (0, torch.zeros_like(x))
        return spmd.while_loop(lambda s: s[0] < 4, lambda s: (s[0] + 1, inner(s[0], x, s[1])), start)[1]

    check(f, torch.tril, randn(4, 4))


@pytest.mark.parametrize("count", [0, 5, 15])
def test_a_condition_that_holds_if_two_do(count: int) -> None:
    x = randn(10)

    def f(x: Tensor, n: Tensor) -> Any:
        def goes_on(state: Any) -> Any:
            return (state[0] < n) & (state[0] < len(x))

        return spmd.while_loop(goes_on, lambda s: (s[0] + 1, s[1] + x[s[0]]), (0, x.new_zeros(())))[1]

    check(f, x[:count].sum(), x, number(count))


def two_at_a_time(x: Tensor) -> Tensor:
    return spmd.while_loop(lambda x: x < 3, lambda x: x + 2, x)


def test_a_batch() -> None:
    check(vmap(two_at_a_time), torch.tensor([4, 3, 4, 3]), torch.arange(4))
    jitted = spmd.jit(two_at_a_time, P(), mesh=THREE)
    assert_same(program(vmap(jitted), torch.arange(4)), torch.tensor([4, 3, 4, 3]))


def test_a_condition_on_the_rank() -> None:
    def body(x: Tensor) -> Tensor:
        return spmd.while_loop(lambda x: x.sum() < collectives.axis_index("x"), lambda x: x + 2, x)

    f = spmd.shard_map(body, LINE, P("x"), P("x"))
    for call in (f, spmd.jit(f, P("x"), mesh=LINE)):
        assert_same(call(spmd.distribute(torch.zeros(4), P("x"), LINE)), torch.tensor([0.0, 2.0, 2.0, 4.0]))


def test_a_batch_whose_body_is_a_constant() -> None:
    def f(x: Tensor) -> Tensor:
        return spmd.while_loop(lambda _: torch.tensor(False), lambda _: torch.tensor(0.0), x)

    check(vmap(f), torch.arange(5.0), torch.arange(5.0))


def test_a_batch_of_limits() -> None:
    def f(limits: Tensor) -> Tensor:
        return vmap(lambda limit: spmd.while_loop(lambda x: x < limit, lambda x: x + 2, 0))(limits)

    check(f, torch.tensor([2, 4]), torch.tensor([2, 3]))


def test_a_batch_of_steps() -> None:
    def f(steps: Tensor) -> Tensor:
        return vmap(lambda step: spmd.while_loop(lambda x: x < 3, lambda x: x + step, 0))(steps)

    check(f, torch.tensor([4, 3]), torch.tensor([2, 3]))


def test_a_batch_of_pairs() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        return spmd.while_loop(lambda s: s[0] + s[1] < 5, lambda s: (s[0] + 1, s[1]), (x, y))

    expected = torch.tensor([4, 3]), torch.tensor([1, 2])
    check(vmap(f), expected, torch.tensor([0, 0]), torch.tensor([1, 2]))


def test_a_batch_of_loops_in_loops() -> None:
    def f(a: Tensor, b: Tensor) -> Any:
        def outer(state: Any) -> Any:
            total, i = state
            total, _ = spmd.while_loop(lambda s: s[1] < b + 1, lambda s: (s[0] + i + s[1], s[1] + 1), (total, 0))
            return total, i + 1

        return spmd.while_loop(lambda s: s[1] < a + 1, outer, (0, 0))[0]

    numbers = range(4)
    expected = [sum(i + j for i in range(n + 1) for j in range(n + 1)) for n in numbers]
    check(vmap(f), torch.tensor(expected), torch.arange(4), torch.arange(4))


@pytest.mark.parametrize("bounds", [(torch.tensor(0, dtype=torch.int16), 10), (0, torch.tensor(10, dtype=torch.int16))])
def test_a_bound_of_another_dtype_than_a_number(bounds: Any) -> None:
    check(lambda x: spmd.fori_loop(*bounds, lambda i, c: c + 1, x), 20.0, torch.tensor(10.0))


def test_a_bound_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    check(lambda x: spmd.fori_loop(numpy.int16(0), 10, lambda i, c: c + 1, x), 20.0, torch.tensor(10.0))


@pytest.mark.parametrize("unroll", [2, 3, 0, True, False])
def test_unrolled_ranges(unroll: int | bool) -> None:
    check(lambda x: spmd.fori_loop(0, 10, lambda i, c: c + i, x, unroll=unroll), 55.0, torch.tensor(10.0))


def test_only_a_range_of_numbers_is_unrolled() -> None:
    def f(upper: Tensor) -> Tensor:
        return spmd.fori_loop(0, upper, lambda i, c: c + 1, torch.tensor(10.0), unroll=3)

    for call in (f, spmd.jit(f, P(), mesh=THREE)):
        with pytest.raises(spmd.TraceError, match="unroll=3 needs integers of Python for lower and upper"):
            call(number(10))


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("upper", [0, -1])
def test_an_empty_range(upper: int, unroll: bool) -> None:
    check(lambda x: spmd.fori_loop(0, upper, lambda i, c: c + 1, x, unroll=unroll), 10.0, torch.tensor(10.0))


def test_an_empty_range_without_jit() -> None:
    def f(x: Tensor) -> Any:
        return spmd.fori_loop(0, 0, lambda i, c: c + i, 1.0), spmd.scan(lambda c, x: (c + x, x), 0.0, x)

    expected = torch.tensor(1.0), (torch.tensor(0.0), torch.zeros(0))
    check(f, expected, torch.zeros(0))
    with spmd.disable_jit():
        assert_same(program(f, torch.zeros(0)), expected)


def test_a_batch_of_ranges() -> None:
    def f(x: Tensor) -> Any:
        return spmd.fori_loop(0, 10, lambda i, s: (s[0] + 1, s[1] + 2), (x, torch.zeros_like(x)))

    check(vmap(f), (torch.tensor([10, 11]), torch.tensor([20, 20])), torch.tensor([0, 1]))


@pytest.mark.parametrize("n", [2, 4])
def test_sums_over_ranges_that_are_data(n: int) -> None:
    def f(n: Tensor) -> Any:
        return spmd.fori_loop(0, n, lambda i, total: total + i, 0), spmd.fori_loop(0, n, lambda i, c: n + c + i, 0)

    check(f, (n * (n - 1) // 2, n * (n - 1) // 2 + n * n), number(n))


STATES: dict[str, Any] = {
    "tuple": (lambda x, total: (x, total), lambda state: state),
    "dict": (lambda x, total: {"x": x, "total": total}, lambda state: (state["x"], state["total"])),
    "tuple with an empty one": (lambda x, total: (x, total, ()), lambda state: state[:2]),
}


@pytest.mark.parametrize("state", STATES)
def test_trees_in_ranges(state: str) -> None:
    make, take = STATES[state]
    x = randn(10)

    def f(x: Tensor, n: Tensor) -> Any:
        def body(i: Tensor, values: Any) -> Any:
            rows, total = take(values)
            return make(rows, total + rows[i])

        return take(spmd.fori_loop(0, n.clamp(max=10), body, make(x, x.new_zeros(()))))[1]

    jitted = spmd.jit(f, (P("x"), P()), mesh=THREE)
    for n in (0, 5, 15):
        assert_same(f(x, number(n)), x[:n].sum())
        assert_same(jitted(x, number(n)), x[:n].sum())


def test_a_value_that_is_set_anew_in_every_trip() -> None:
    check(lambda b: spmd.while_loop(lambda s: s[1] < 10, lambda s: (7, s[1] + 1), (33, b)), (7, 10), number(4))


def test_a_loop_over_nothing() -> None:
    assert spmd.while_loop(lambda _: False, lambda _: (), ()) == ()
    assert program(lambda: spmd.while_loop(lambda _: False, lambda _: (), ())) == ()


def squares(x: Tensor, loop: Any = spmd.while_loop) -> Tensor:
    squared: Tensor = loop(lambda x: x[0, 2] <= 8, lambda x: x * x, x)
    return squared


def squares_by_hand(x: Tensor) -> Tensor:
    return squares(x, while_by_hand)


def test_forward_derivatives() -> None:
    check_derivatives(squares, squares_by_hand, arange(3, 3), reverse=False, twice=True, specs=(P(None, "x"),))


@pytest.mark.parametrize("again", [False, True])
def test_linearize(again: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return checkpoint(squares, x, use_reentrant=False) if again else squares(x)

    x = arange(3, 3)
    expected = jvp(squares_by_hand, (x,), (x,))
    check(lambda x: (squares(x), linearize(f, x)[1](x)), expected, x)


def test_forward_derivatives_of_ranges() -> None:
    x = torch.tensor(2.0)
    for body, slope in ((lambda i, x: x * 2, 8), (lambda i, x: x * (i + 1), 6)):
        check_derivatives(
            lambda x, body=body: spmd.fori_loop(0, 3, body, x), lambda x, n=slope: n * x, x, reverse=False, twice=True
        )


def test_tangents_that_reach_a_value_in_a_later_trip() -> None:
    y, z = randn(2), randn(2)

    def f(loop: Any, x: Tensor) -> Any:
        def body(state: Any) -> Any:
            i, x, y, z = state
            return i + 1, x + z * 0.1, x * x, y * y

        return loop(lambda state: state[0] < 2, body, (torch.tensor(0), x, y, z))[1:]

    check_derivatives(lambda x: f(spmd.while_loop, x), lambda x: f(while_by_hand, x), randn(2), reverse=False)


def test_a_gradient_through_a_range_of_fixed_bounds() -> None:
    def f(x: Tensor) -> Tensor:
        return spmd.fori_loop(1, 3, lambda i, c: c, x)

    check(grad(f), 1.0, torch.tensor(1.0))
    check(lambda x: linearize(f, x)[1](x), 1.0, torch.tensor(1.0))


def by_condition(x: Tensor) -> Tensor:
    return spmd.while_loop(lambda i: i < 5, lambda i: i + 1, x)


def in_a_branch(x: Tensor) -> Tensor:
    n = x.detach().long() + 2
    return spmd.cond(x > 0, lambda x: spmd.fori_loop(0, n, lambda i, c: c * 2, x), lambda x: x, x)


def in_a_scan(x: Tensor) -> Tensor:
    n = x.detach().long() + 2
    return spmd.scan(lambda c, y: (spmd.fori_loop(0, n, lambda i, a: a * c, y), None), x, torch.ones(2))[0]


@pytest.mark.parametrize("f", [by_condition, in_a_branch, in_a_scan])
def test_reverse_mode_of_a_length_that_is_data(f: Any) -> None:
    one = torch.tensor(1.0)
    with pytest.raises(spmd.TraceError, match=r"while_loop at .* reverse mode.*or torch.no_grad\(\) around the call"):
        program(grad(f), one)
    expected = jvp(f, (one,), (one,))  # on plain tensors Python runs the loop, in either mode
    assert_same(grad(f)(one), expected[1])
    check(lambda x: linearize(f, x)[1](x), expected[1], one)


def test_programs_of_their_own_in_a_range() -> None:
    def body(x: Tensor) -> Tensor:
        return collectives.psum(x.sin().sum(), "x") + x

    mapped = spmd.shard_map(body, PAIR, P("x"), P("x"))
    x = spmd.distribute(torch.ones(4), P("x"), PAIR)

    def f(x: Tensor) -> Tensor:
        return spmd.fori_loop(0, 3, lambda i, x: mapped(x), x)

    expected = spmd.fori_loop(0, 3, lambda i, x: x.sin().sum() + x, torch.ones(4))
    assert_same(f(x), expected)
    assert_same(spmd.jit(f, P("x"), mesh=PAIR)(x), expected)


def test_a_batch_without_jit() -> None:
    def f(x: Tensor) -> Tensor:
        return vmap(lambda y: spmd.while_loop(lambda x: x < 10, lambda x: x + 1, y))(x)

    with spmd.disable_jit():
        assert_same(program(f, torch.tensor([3.0, 4.0])), torch.full((2,), 10.0))


def test_two_batches_of_ranges() -> None:
    def f(x: Tensor, n: Tensor) -> Tensor:
        return spmd.fori_loop(torch.zeros_like(n), n, lambda _, x: x + 1, x)

    both = vmap(vmap(f, (None, 0)), (0, None))
    check(both, torch.arange(3)[:, None] + torch.arange(4), torch.arange(3), torch.arange(4))


def test_a_body_that_writes_to_what_it_gets() -> None:
    def f(x: Tensor) -> Any:
        def body(state: Any) -> Any:
            x, y = state
            x += 1
            return x, y + x

        return spmd.while_loop(lambda s: s[0] < 10, body, (x, x))[1]

    with pytest.raises(spmd.TraceError, match="In-place write to argument of the body"):
        program(f, torch.tensor(1.0))


def test_a_number_is_a_tensor_of_the_default_dtype_of_its_kind() -> None:
    def f(step: Tensor) -> Tensor:
        return spmd.while_loop(lambda x: x < 2, lambda x: x + step, 0)

    check(f, number(2), number(1, torch.int8))  # as torch adds two tensors without dims; of JAX it is an int8
    check(f, number(2, torch.float64), number(1, torch.float64))


def test_a_batch_of_conditions_and_of_what_is_closed_over() -> None:
    def f(i: Tensor, x: Tensor) -> Any:
        return spmd.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] + x), (i, torch.ones(3)))[1]

    x = torch.rand(3, 4)
    expected = 1 + x.T * torch.tensor([5.0, 4, 3, 2])[:, None]
    check(vmap(f, (0, 1)), expected, torch.arange(4), x)


def test_a_checkpointed_loop_that_exchanges() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x, y = spmd.while_loop(lambda _: torch.tensor(False), lambda s: (s[1], s[0]), (x, y))
        return x + y

    def derivative(x: Tensor, y: Tensor) -> Any:
        return linearize(lambda x, y: checkpoint(f, x, y, use_reentrant=False), x, y)[1](x, y)

    check(derivative, 3.0, torch.tensor(1.0), torch.tensor(2.0))


def test_what_a_loop_does_not_change_has_no_batch() -> None:
    def f(w: Tensor, x: Tensor, end: Tensor) -> Any:
        _, x, w = spmd.while_loop(lambda s: s[0] < end, lambda s: (s[0] + 1, s[1] @ s[2], s[2]), (0, x, w))
        return w, x

    w, xs, ends = randn(2, 2), randn(4, 2), torch.arange(4)
    batch = vmap(f, (None, 0, 0), (None, 0))
    powers = torch.stack([x @ torch.linalg.matrix_power(w, n) for n, x in enumerate(xs)])
    check(batch, (w, powers), w, xs, ends)
    text = spmd.jit(batch, (P(), P("x"), P("x")), mesh=GRID).lower(w, xs, ends).as_text()
    assert "return (w, next_" in text, "the weight is one for all"


@pytest.mark.parametrize("seed", range(3))
def test_values_that_a_body_returns_in_some_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(7, generator=generator).tolist()
    constants = [torch.rand(3, generator=generator) for _ in range(seed)]

    def body(state: Any) -> Any:
        i, values = state
        after = [x.sin() * sum((c.sum() for c in constants), torch.tensor(1.0)) for x in values[seed + 1 :]]
        return i + 1, [[*values[: seed + 1], *after][n] for n in order]

    def goes_on(state: Any) -> Any:
        return (state[0] < 2) & (state[1][0] < 100)

    values = list(torch.rand(7, generator=generator))
    expected = body(body((0, values)))
    check(lambda *values: spmd.while_loop(goes_on, body, (0, list(values))), expected, *values)


def test_a_value_that_moves_to_another_place() -> None:
    def f(*state: Tensor) -> Any:
        return spmd.while_loop(lambda s: s[1] == 0, lambda s: (0.0, 1.0, s[0]), state)

    check(f, (0.0, 1.0, 5.0), *(torch.tensor(x) for x in (5.0, 0.0, 3.14)))


def test_results_are_whole() -> None:
    result = program(squares, arange(3, 3))
    assert_same(whole(result), squares_by_hand(arange(3, 3)))
