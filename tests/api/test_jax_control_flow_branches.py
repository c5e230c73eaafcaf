"""`cond` and `switch`, where JAX has tests of its own loops and branches."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compared_calls import THREE, check, check_derivatives, program
from manual_cases import GRID, arange, assert_same, randn
from sampling import product, sample
from torch import Tensor
from torch.func import grad, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import P


def by_switch(predicate: Any, f: Any, g: Any, *operands: Any) -> Any:
    return spmd.switch(torch.as_tensor(predicate).long(), [g, f], *operands)


def by_checkpoint(predicate: Any, f: Any, g: Any, *operands: Any) -> Any:
    return checkpoint(lambda *given: spmd.cond(predicate, f, g, *given), *operands, use_reentrant=False)


CONDS = {"cond": spmd.cond, "switch": by_switch, "checkpoint": by_checkpoint}
conds = pytest.mark.parametrize("cond", sample(CONDS.values(), [spmd.cond]))


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def int_or_double(x: Any) -> Any:
    return (x, x) if x < 3 else (2 * x, 4 * x)


def int_or_double_by_cond(x: Any) -> Any:
    return spmd.cond(x < 3, lambda x: (x, x), lambda x: (2 * x, 4 * x), x)


def test_pairs_by_a_comparison() -> None:
    jitted = spmd.jit(int_or_double_by_cond, mesh=THREE)
    for x in range(5):
        expected = tuple(map(torch.tensor, int_or_double(x)))
        assert_same(int_or_double_by_cond(torch.tensor(x)), expected)
        assert_same(jitted(torch.tensor(x)), expected)


@pytest.mark.parametrize("count", [2, 3])
def test_several_operands(count: int) -> None:
    def f(x: Tensor) -> Tensor:
        return spmd.cond(x == 0, lambda *xs: sum(xs), lambda *xs: torch.stack(xs).prod(0), *(x,) * count)  # type: ignore[arg-type, return-value]

    for x in (0, 1, 3):
        check(f, 0 if x == 0 else x**count, torch.tensor(x))


def test_an_operand_that_can_be_called() -> None:
    class Holder:
        def __init__(self, x: Any) -> None:
            self.x = x

        def __call__(self) -> None:
            raise AssertionError

    register_pytree_node(Holder, lambda node: ([node.x], None), lambda leaves, _: Holder(*leaves))
    for a, b in ((3, Holder(4)), (Holder(3), 4), (Holder(3), Holder(4))):

        def add(a: Any, b: Any) -> Any:
            return getattr(a, "x", a) + getattr(b, "x", b)

        check(lambda a=a, b=b, add=add: spmd.cond(True, add, add, a, b), 7)


THREE_PAIRS: list[Callable[[Any], Any]] = [lambda x: (x, x), lambda x: (2 * x, 4 * x), lambda x: (x, -x)]


def test_switch_clamps_its_index() -> None:
    f = lambda x: spmd.switch(x, THREE_PAIRS, x)  # noqa: E731
    jitted = spmd.jit(f, mesh=THREE)
    for x in range(-1, 4):
        expected = tuple(map(torch.tensor, THREE_PAIRS[min(max(x, 0), 2)](x)))
        assert_same(f(torch.tensor(x)), expected)
        assert_same(jitted(torch.tensor(x)), expected)


def test_switch_of_several_operands() -> None:
    for x in (-1, 0, 1, 2):
        check(lambda x: spmd.switch(x, [torch.add, torch.mul], x, x), 2 * x if x <= 0 else x * x, torch.tensor(x))


def test_switch_of_one_branch() -> None:
    x = torch.tensor(7.0)
    static = spmd.jit(lambda i, x: spmd.switch(i, [torch.neg], x), P(), mesh=THREE, static_argnums=0)
    for index in (-1, 0, 1):
        check(lambda i, x: spmd.switch(i, [torch.neg], x), -x, torch.tensor(index), x)
        assert_same(static(index, x), -x)


def test_numbers_are_predicates() -> None:
    def f(x: Any) -> Any:
        return spmd.cond(x, lambda x: (True, x), lambda x: (False, x), x)

    for x in (0, 0.0, 1, 1.0):
        check(f, (bool(x), x), torch.tensor(x))
        assert_same(f(x), (torch.tensor(bool(x)), torch.tensor(x)))
    for x in ("abc", [], [1, 2]):
        for call in (f, lambda x: program(lambda: f(x))):  # type: ignore[misc]
            with pytest.raises(spmd.TraceError, match="pred must be a boolean scalar"):
                call(x)


@conds
def test_a_branch_in_a_branch(cond: Any) -> None:
    def f(x: Tensor) -> Any:
        inner = lambda x: cond(x < 5, lambda x, _: 3 * x, lambda x, y: y * x, x, 4)  # noqa: E731
        return cond(x < 2, lambda x: 2 * x, inner, x)

    jitted = spmd.jit(f, mesh=THREE)
    for x, expected in ((1, 2), (3, 9), (6, 24)):
        assert_same(jitted(torch.tensor(x)), torch.tensor(expected))


def test_a_constant_from_one_branch() -> None:
    for x in (0, 4):
        check(lambda x: spmd.cond(x < 3, lambda x: 5, lambda x: x, x), 5 if x < 3 else x, torch.tensor(x))

    def f(x: Tensor) -> Any:
        return spmd.cond(x < 3, lambda x: (1.0, 2.0, 3.0), lambda x: (x, 2.0, 4.0), x)

    for x in (0.0, 4.0):
        check(f, (1.0, 2.0, 3.0) if x < 3 else (x, 2.0, 4.0), torch.tensor(x))


ROWS = torch.tensor([1, 2]), torch.tensor([3, 4])
BATCHES: list[tuple[Any, Any, Any, Any]] = [
    ((None, 0, 0), (torch.tensor(2), *ROWS), torch.tensor([1, 2]), False),
    ((None, 0, 0), (torch.tensor(4), *ROWS), torch.tensor([-3, -4]), False),
    ((None, 0, None), (torch.tensor(4), ROWS[0], torch.tensor(5)), torch.tensor([-5, -5]), False),
    ((0, 0, None), (torch.tensor([2, 4]), ROWS[0], torch.tensor(5)), torch.tensor([1, -5]), True),
    ((0, 0, 0), (torch.tensor([2, 4]), *ROWS), torch.tensor([1, -4]), True),
]


@pytest.mark.parametrize("dims, args, expected, selects", BATCHES)
def test_batches_of_a_branch(dims: Any, args: Any, expected: Tensor, selects: bool) -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> Any:
        return spmd.cond(x < 3, lambda y, z: y, lambda y, z: -z, y, z)

    mapped = vmap(f, dims)
    check(mapped, expected, *args)
    text = spmd.jit(mapped, (P(),) * 3, mesh=THREE).lower(*args).as_text()
    assert (selects, not selects) == ("where(" in text, "if lt" in text)


@pytest.mark.parametrize("dims, args, expected, selects", BATCHES)
def test_batches_of_a_switch(dims: Any, args: Any, expected: Tensor, selects: bool) -> None:
    def f(index: Tensor, y: Tensor, z: Tensor) -> Any:
        return spmd.switch(index, [lambda y, z: y, lambda y, z: -z, lambda y, z: z.sign()], y, z)

    check(vmap(f, dims), expected, (args[0] > 2).long(), *args[1:])


def test_derivatives_of_pairs() -> None:
    for x in (3.14, 2.72):
        check_derivatives(int_or_double_by_cond, int_or_double, scalar(x), reverse=False, twice=True)


def unit(x: Tensor) -> int:
    return int(x.detach().floor().clamp(0, 2))


SLOPES: list[Callable[[Tensor], Any]] = [lambda x: 3 * x, torch.sin, torch.neg]


LISTS = {"pairs": THREE_PAIRS, "numbers": SLOPES}


@pytest.mark.parametrize("branches, x", product(LISTS, (1.7, -0.7, 3.7)))
def test_derivatives_of_a_switch(branches: str, x: float) -> None:
    check_derivatives(
        lambda x: spmd.switch(x.floor().long(), LISTS[branches], x),
        lambda x: LISTS[branches][unit(x)](x),
        scalar(x),
    )


@pytest.mark.slow
@pytest.mark.parametrize("x", [-0.7, 1.7, 3.7])
@pytest.mark.parametrize("reverse", [False, True])
def test_second_derivatives_of_a_switch(x: float, reverse: bool) -> None:
    check_derivatives(
        lambda x: spmd.switch(x.floor().long(), SLOPES, x), lambda x: SLOPES[unit(x)](x), scalar(x),
        reverse=reverse, twice=True,
    )  # fmt: skip


@pytest.mark.parametrize("x, cond", product((3.14, 2.72), CONDS.values()))
def test_derivatives_beside_a_constant(cond: Any, x: float) -> None:
    def f(x: Tensor) -> Any:
        return cond(x < 3, lambda _: scalar(2.0), lambda x: 2 * x, x)

    check_derivatives(f, lambda x: 0 * x + 2 if x < 3 else 2 * x, scalar(x), reverse=cond is not by_checkpoint)


@pytest.mark.parametrize("x, reverse", [(2.14, True), (1.72, False)])
def test_second_derivatives_of_a_branch(x: float, reverse: bool) -> None:
    check_derivatives(
        lambda x: spmd.cond(x < 2, lambda x: 3 * x, torch.sin, x), lambda x: 3 * x if x < 2 else x.sin(), scalar(x),
        reverse=reverse, twice=True,
    )  # fmt: skip


def test_a_gradient_is_that_of_the_branch_that_is_selected() -> None:
    def by_operand(x: Tensor) -> Tensor:
        return spmd.cond(x < 1e-3, lambda x: torch.full_like(x, 1e-3), torch.sqrt, x)

    def by_closure(x: Tensor) -> Tensor:
        return spmd.cond(x < 1e-3, lambda: torch.tensor(1e-3), lambda: x.sqrt())

    x = torch.tensor([0.0, 0.25, 0.0, 4.0, 0.0])
    slopes = torch.tensor([0.0, 1.0, 0.0, 0.25, 0.0])
    check(grad(lambda x: vmap(by_operand)(x).sum()), slopes, x)
    assert_same(program(grad(lambda x: vmap(by_closure)(x).sum()), x), slopes)
    check(vmap(grad(by_operand)), slopes, x)


@pytest.mark.xfail(reason="functions that Python calls hide what they close over", strict=True)
def test_a_gradient_outside_of_jit_is_that_of_the_branch_that_is_selected() -> None:
    safe = vmap(lambda x: spmd.cond(x < 1e-3, lambda: torch.tensor(1e-3), lambda: x.sqrt()))
    assert not grad(lambda x: safe(x).sum())(torch.zeros(3)).isnan().any()


@pytest.mark.parametrize("seed", sample(range(3), [2]))
def test_derivatives_of_branches_that_forward(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    order, back = (torch.randperm(3, generator=generator).tolist() for _ in range(2))

    def branch(factor: int) -> Callable[..., Any]:
        def function(*values: Tensor) -> list[Tensor]:
            given = [values[n] for n in order]
            made = [given[:seed], [factor * x.exp() for x in given[seed:2]], [x.sin() for x in given[max(seed, 2) :]]]
            outputs = [x for part in made for x in part]
            return [outputs[n] for n in back]

        return function

    branches = [branch(n) for n in range(3)]

    def derivatives(f: Callable[..., Any]) -> Callable[..., Any]:
        def both(*xs: Tensor) -> Any:
            outputs, pull = vjp(f, *xs)
            return jvp(f, xs, xs), pull(outputs)

        return both

    for index in range(3):
        f = lambda *xs, index=index: spmd.switch(torch.tensor(index), branches, *xs)  # noqa: E731
        check(derivatives(f), derivatives(branches[index]), *arange(3).unbind())


@pytest.mark.parametrize("x", [0.0, 1.0])
def test_a_gradient_beside_a_branch_with_another_type(x: float) -> None:
    branches: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: x + torch.tensor(1.0)]
    check(grad(lambda x: spmd.switch(x.int(), branches, x)), 1.0, torch.tensor(x))


@pytest.mark.parametrize("x, cond", product((2.14, 1.72), CONDS.values()))
def test_derivatives_of_vectors(cond: Any, x: float) -> None:
    factors = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def f(x: Tensor) -> Any:
        return cond(x[0] < 2, lambda x: factors * x, torch.sin, x).sum()

    def by_hand(x: Tensor) -> Tensor:
        return (factors * x if x[0] < 2 else x.sin()).sum()

    check_derivatives(f, by_hand, x * torch.ones(2, dtype=torch.float64), reverse=cond is not by_checkpoint)


@conds
def test_gradients_with_checkpoints(cond: Any) -> None:
    def f(x: Tensor) -> Any:
        return cond(x[0] < 2, lambda x: x.exp(), torch.sin, x).sum()

    for x in (2.5 * torch.ones(2), torch.ones(2)):
        expected = x.exp() if x[0] < 2 else x.cos()
        assert_same(program(grad(f), x), expected)


@pytest.mark.parametrize("x, cond", product((3.14, 2.72), CONDS.values()))
def test_derivatives_of_what_a_branch_closes_over(cond: Any, x: float) -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        return cond(x < 3, lambda _: 2 * y.sin(), lambda x: 2 * x.cos(), x)

    def by_hand(x: Tensor, y: Tensor) -> Tensor:
        return 2 * y.sin() + 0 * x if x < 3 else 2 * x.cos() + 0 * y

    check_derivatives(f, by_hand, scalar(x), scalar(5.8), reverse=cond is not by_checkpoint)


def test_linearize() -> None:
    def f(x: Tensor) -> Tensor:
        return spmd.cond(x < 2, lambda x: 3 * x, torch.sin, x)

    four = scalar(4.0)
    for x, expected in ((scalar(1.0), (scalar(3.0), scalar(6.0))), (four, (four.sin(), 2 * four.cos()))):
        check(lambda x: (f(x), linearize(f, x)[1](2 * torch.ones_like(x))), expected, x)


def test_linearize_a_switch() -> None:
    def f(x: Tensor) -> Tensor:
        return spmd.switch(x.floor().long(), SLOPES, x)

    for x in (-1.0, 1.0, 3.0):
        tangent = scalar(2.0)
        expected = jvp(SLOPES[unit(scalar(x))], (scalar(x),), (tangent,))
        check(lambda x, tangent=tangent: (f(x), linearize(f, x)[1](tangent)), expected, scalar(x))


@conds
def test_linearize_vectors(cond: Any) -> None:
    def f(x: Tensor) -> Any:
        return cond(x[0] < 2, lambda x: torch.arange(1.0, 3) * x, lambda x: x.sin().cos(), x).sum()

    def by_hand(x: Tensor) -> Tensor:
        return (torch.arange(1.0, 3) * x if x[0] < 2 else x.sin().cos()).sum()

    for x in (2.14 * torch.ones(2), -2.14 * torch.ones(2)):
        check(lambda x: linearize(f, x)[1](x), jvp(by_hand, (x,), (x,))[1], x)


def test_jitted_branches() -> None:
    f = lambda x: spmd.cond(x < 2, lambda x: 3 * x, torch.sin, x)  # noqa: E731
    g = lambda x: spmd.switch(x.floor().long(), SLOPES, x)  # noqa: E731
    for x in (-1.0, 1.0, 4.0):
        check(f, 3 * scalar(x) if x < 2 else scalar(x).sin(), scalar(x))
        check(g, SLOPES[unit(scalar(x))](scalar(x)), scalar(x))


@conds
def test_branches_without_jit(cond: Any) -> None:
    with spmd.disable_jit():
        check(lambda x: cond(x < 2, lambda x: 3 * x, torch.sin, x), 3.0, torch.tensor(1.0))


@conds
def test_constants_of_branches(cond: Any) -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    for x in (1.0, 4.0):
        check(
            lambda x: cond(x < 2, lambda x: first * x, lambda x: second * x.sin(), x),
            first * x if x < 2 else second * torch.tensor(x).sin(),
            torch.tensor(x),
        )


@conds
def test_a_batch_of_gradients(cond: Any) -> None:
    f = lambda x: cond(x > 0, lambda x: x**2, lambda x: x**3, x)  # noqa: E731
    x = torch.linspace(-1, 1, 20)
    mapped = vmap(grad(f))
    if cond is by_checkpoint:
        assert_same(program(mapped, x), torch.where(x > 0, 2 * x, 3 * x**2))
    else:
        check(mapped, torch.where(x > 0, 2 * x, 3 * x**2), x)


def test_random_branches_of_a_batch() -> None:
    def f(x: Tensor) -> Tensor:
        def trip(_: Tensor, x: Tensor) -> Tensor:
            return spmd.cond(torch.rand(()) < 0.5, lambda x, _: x, lambda _, y: y, x, x.abs() - 1)

        return spmd.fori_loop(0, 4, trip, x)

    x = torch.ones(3, 4)
    torch.manual_seed(0)
    found = vmap(f, randomness="different")(x)
    assert set(found.unique().tolist()) <= {0.0, 1.0, -1.0}
    assert found.shape == x.shape


def test_numbers_and_trees() -> None:
    f = lambda: spmd.cond(True, lambda x, _: (x[0], 0), lambda _, x: x, (0, 0), (1, 1))  # noqa: E731
    check(f, (0, 0))
    found = spmd.cond(True, lambda x: x, lambda x: x, 1.0)
    assert_same(found, torch.tensor(1.0))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * torch.arange(3.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.arange(3.0)


def test_a_branch_with_a_derivative_of_its_own() -> None:
    f = lambda x: spmd.cond(x.sum() > 0, _Scaled.apply, lambda x: x, x)  # noqa: E731
    x = torch.arange(3.0)
    check(lambda x: jvp(f, (x,), (x,)), (x, x * x), x)
    check(lambda x: vjp(f, x)[1](x)[0], x * x, x)


def test_a_program_with_a_branch_is_traced_once() -> None:
    traces = []
    f = spmd.jit(lambda x: spmd.cond(x % 2, lambda x: traces.append(0) or x + 1, lambda x: x + 2, x), mesh=THREE)  # type: ignore[func-returns-value]
    assert [2, 2, 4, 4, 6] == [int(f(torch.tensor(x)).full_tensor()) for x in range(5)]
    assert len(traces) == 1


def test_a_batch_without_jit() -> None:
    f = lambda x: vmap(lambda t: spmd.cond(t > 0, lambda a, _: 0, lambda _, b: 1, 0, 0))(x)  # noqa: E731
    with spmd.disable_jit():
        check(f, torch.tensor([0, 1]), torch.tensor([1, -1]))


def test_a_loop_of_branches_is_a_power() -> None:
    def power(x: Tensor) -> Tensor:
        def trip(state: Any, _: None) -> Any:
            value, goes_on = state
            return spmd.cond(goes_on, lambda v: (v * x, True), lambda v: (v, False), value), None

        return spmd.scan(trip, (torch.ones_like(x), torch.tensor(True)), None, length=2)[0][0]

    check(lambda x: linearize(power, x)[1](torch.ones_like(x)), 6.0, torch.tensor(3.0))


def test_a_batch_of_jacobians() -> None:
    same = lambda x: spmd.cond(x < 0, lambda x: x, lambda x: x, x)  # noqa: E731
    check(vmap(jacrev(lambda x: same(same(x)))), torch.ones(2), torch.ones(2))


def test_a_derivative_of_its_own_with_a_switch() -> None:
    branches: list[Callable[[Tensor], Tensor]] = [lambda x: x.sum(), lambda x: 1 - x.sum()]
    slopes: list[Callable[[Tensor], Tensor]] = [lambda g: g.expand(3).clone(), lambda g: -g.expand(3)]

    class Chosen(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, choice: Tensor) -> Tensor:
            return spmd.switch(choice, branches, x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[1])

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return spmd.switch(ctx.saved_tensors[0], slopes, gradient), None

    for choice in (0, 1):
        expected = torch.full((3,), 1.0 - 2 * choice)
        check(lambda x, c: grad(lambda x: Chosen.apply(x, c))(x), expected, torch.arange(3.0), torch.tensor(choice))
        check(grad(lambda x, c: spmd.switch(c, branches, x)), expected, torch.arange(3.0), torch.tensor(choice))


def test_what_both_branches_return_as_it_is_has_no_batch() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        return spmd.cond(x < 3, lambda x, y: (x * 2, y), lambda x, y: (x * 3, y), x, y)

    x = torch.arange(5.0)
    check(vmap(f, (0, None), (0, None)), (torch.where(x < 3, 2 * x, 3 * x), 3.0), x, torch.tensor(3.0))


def test_a_loop_in_a_branch_that_returns_what_it_gets_has_no_batch() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        same = lambda _, y: spmd.scan(lambda y, _: (y, None), y, None, length=1)[0]  # noqa: E731
        return spmd.cond(x < 0, same, same, x, y)

    check(vmap(f, (0, None), None), 3.0, torch.arange(3.0), torch.tensor(3.0))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


@pytest.mark.parametrize("f, slope", [(_Reversed.apply, -1.0), (Tensor.detach, 0.0)])
def test_what_is_returned_as_it_is_keeps_its_derivative(f: Any, slope: float) -> None:
    by_cond = lambda x: (spmd.cond(x.sum() > 0, f, f, x) + 0 * x).sum()  # noqa: E731
    by_loop = lambda x: (spmd.fori_loop(0, 3, lambda i, x: f(x), x) + 0 * x).sum()  # noqa: E731
    for function in (by_cond, by_loop):
        check(grad(function), torch.full((3,), slope), torch.ones(3))


def _first_row_by_cond(data: Tensor) -> Any:
    return spmd.jit(lambda: spmd.cond(True, lambda: data[0], lambda: data[1]), mesh=THREE)


def test_nothing_is_held_by_a_program_that_is_gone() -> None:
    data = torch.rand(16)
    seen = weakref.ref(data)
    f = _first_row_by_cond(data)
    assert_same(f(), data[0])
    del f, data
    gc.collect()
    assert seen() is None


def test_gradients_by_a_bool_of_python() -> None:
    for f in (
        lambda x: spmd.cond(True, torch.sin, lambda x: x, x),
        lambda x: spmd.cond(True, torch.sin, lambda x: 1.0, x),
    ):
        check(lambda x, f=f: vjp(f, x)[1](torch.ones_like(x))[0], torch.tensor(1.0).cos(), torch.tensor(1.0))


def test_rows_are_sharded_in_branches() -> None:
    x = randn(6, 4)
    f = lambda x: spmd.cond(x.sum() > 0, lambda x: x @ x.T, lambda x: -x @ x.T, x)  # noqa: E731
    check(f, lambda x: x @ x.T if x.sum() > 0 else -x @ x.T, x, mesh=GRID, specs=(P("x", "y"),))
