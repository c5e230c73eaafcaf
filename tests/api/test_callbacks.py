"""`spmd.debug.callback` and `spmd.pure_callback`: functions of the host that programs call."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

import spmd
from spmd import P, TensorMeta, debug
from spmd.collectives import axis_index, psum
from spmd.lowering.verify import verify

LINE = spmd.make_mesh({"x": 2}, runtime="virtual")
GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _no_earlier_calls() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def note(*values: Any, **named: Any) -> None:
    listed = [value.tolist() if isinstance(value, torch.Tensor) else value for value in (*values, *named.values())]
    SEEN.append(listed[0] if len(listed) == 1 else listed)


def noted(x: torch.Tensor) -> torch.Tensor:
    debug.callback(note, x)
    return x * x


def cube(x: torch.Tensor) -> Any:
    return numpy.power(x.numpy(), 3)


def cubed(x: torch.Tensor, method: str | None = None) -> torch.Tensor:
    return spmd.pure_callback(cube, x, x, vmap_method=method) + x  # type: ignore[no-any-return]


def calls(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function is called with; the second call of a program must have the same."""
    SEEN.clear()
    function(*args)
    first = list(SEEN)
    SEEN.clear()
    function(*args)
    assert first == SEEN
    return first


def whole(result: Any) -> torch.Tensor:
    return result.full_tensor() if isinstance(result, spmd.DTensor) else result


@pytest.mark.parametrize("length", [8, 5, 3])
def test_in_jit_each_rank_is_called_with_its_shard(length: int) -> None:
    x = torch.arange(float(length))
    step = spmd.jit(noted, P("x"), P("x"), mesh=GRID)
    half = -(-length // 2)
    assert [x[:half].tolist()] * 2 + [x[half:].tolist()] * 2 == calls(step, x)
    assert torch.equal(x * x, step(x).full_tensor())
    assert [] == list(step.plan(x).comms)
    verify(step.lower(x))


def test_a_pending_sum_is_reduced_first() -> None:
    assert [6.0, 6.0] == calls(spmd.jit(lambda x: noted(x.sum()), P("x"), P(), mesh=LINE), torch.arange(4.0))


@pytest.mark.parametrize("length", [4, 3])
def test_in_shard_map_each_rank_is_called_with_its_own(length: int) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        debug.callback(note, axis_index("x"), {"of": [x, None]}["of"][0], name="me")
        debug.callback(note, "nothing")
        return noted(psum(x.sum(), "x"))

    x = torch.arange(float(length))
    expected = [[0, [0.0, 1.0], "me"], [1, x[2:].tolist(), "me"], *["nothing"] * 2, *[x.sum().item()] * 2]
    mapped = spmd.shard_map(body, LINE, P("x"), P())
    assert expected == calls(mapped, x)
    assert expected == calls(spmd.jit(mapped, P("x"), P(), mesh=LINE), x)


def test_arguments_are_trees_and_dynamic_numbers() -> None:
    def function(x: dict[str, torch.Tensor], rate: float) -> torch.Tensor:
        debug.callback(lambda tree, rate, other: note(tree["a"], rate, other), x, rate, other=[1, "two"])
        return x["a"] * rate

    step = spmd.jit(function, mesh=LINE)
    x = {"a": torch.ones(2)}
    assert [[[1.0, 1.0], 0.5, [1, "two"]]] * 2 == calls(step, x, 0.5)
    assert [[[1.0, 1.0], 0.25, [1, "two"]]] * 2 == calls(step, x, 0.25)
    assert 1 == step.cache_info().currsize


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad(lambda x: noted(x).sum()),
        lambda x: torch.func.jvp(noted, (x,), (torch.ones_like(x),))[1],
        torch.func.grad(torch.func.grad(lambda x: (noted(x) * x).sum())),
    ],
    ids=["grad", "jvp", "grad of grad"],
)
def test_a_differentiated_value_keeps_its_gradient(transform: Callable[..., torch.Tensor]) -> None:
    x = torch.tensor(3.0)
    expected = transform(x)
    assert [3.0] == SEEN
    step = spmd.jit(transform, P(), P(), mesh=LINE)
    assert [3.0, 3.0] == calls(step, x)
    assert torch.equal(expected, step(x).full_tensor())


def test_under_transforms_from_outside() -> None:
    step = spmd.jit(noted, P("x"), P("x"), mesh=LINE)
    x = spmd.distribute(torch.arange(4.0), P("x"), LINE).requires_grad_()
    loss = step(x).sum()
    loss.backward()
    assert [[0.0, 1.0], [2.0, 3.0]] == SEEN
    SEEN.clear()
    torch.func.grad(lambda x: step(x).sum())(x.detach())
    assert [[0.0, 1.0], [2.0, 3.0]] == SEEN


def test_under_vmap_it_is_called_for_each_example() -> None:
    x = torch.arange(4.0).view(2, 2)
    torch.vmap(noted)(x)
    assert x.tolist() == SEEN
    expected = [[0.0, 1.0]] * 2 + [[2.0, 3.0]] * 2
    assert expected == calls(spmd.jit(torch.vmap(noted), P(), P(), mesh=LINE), x)
    assert expected == calls(torch.vmap(spmd.jit(noted, P(), P(), mesh=LINE)), x)
    assert x.tolist() == calls(spmd.shard_map(torch.vmap(noted), LINE, P("x"), P("x")), x)


def test_outside_of_programs_and_uncompiled() -> None:
    x = torch.arange(4.0)
    shards = [[0.0, 1.0], [2.0, 3.0]]
    sharded = spmd.distribute(x, P("x"), LINE)
    debug.callback(note, x.requires_grad_())
    assert [x.tolist()] == SEEN
    assert shards == calls(noted, sharded)
    with spmd.disable_jit():
        assert shards == calls(spmd.shard_map(noted, LINE, P("x"), P("x")), x.detach())
        assert [x.tolist()] == calls(spmd.jit(noted, P("x"), P("x"), mesh=LINE), x.detach())


def test_what_it_keeps_does_not_change() -> None:
    kept: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + 1
            debug.callback(kept.append, x)
        return x

    spmd.jit(function, P("x"), P("x"), mesh=LINE, donate_argnums=0)(torch.zeros(2))
    assert [[1.0], [1.0], [2.0], [2.0], [3.0], [3.0]] == [x.tolist() for x in kept]
    assert 6 == len({x.data_ptr() for x in kept})


class Log:
    def __init__(self) -> None:
        self.values: list[Any] = []
        self.count = 0

    def __call__(self, x: torch.Tensor) -> None:
        self.values.append(x)
        self.count += 1


LOG = Log()


def test_what_only_it_reads_is_no_part_of_the_trace() -> None:
    def made() -> list[Callable[..., Any]]:
        seen: list[Any] = []

        def append(x: torch.Tensor) -> None:
            seen.append(x)

        return [
            lambda x: debug.callback(append, x) or x,
            lambda x: debug.callback(seen.append, x) or x,
            lambda x: debug.callback(lambda y: seen.append(y), x) or x,
            lambda x: debug.callback(functools.partial(append), x) or x,
            lambda x: debug.callback(SEEN.append, x) or x,
            lambda x: debug.callback(LOG, x) or x,
            noted,
        ]

    for function in made():
        step = spmd.jit(function, P("x"), mesh=LINE)
        for _ in range(3):
            step(torch.zeros(2))
        assert (2, 1) == step.cache_info()[:2]
    assert 6 == LOG.count


def test_what_its_caller_reads_beside_it_is_seen() -> None:
    scale = [1.0]

    def function(x: torch.Tensor) -> torch.Tensor:
        debug.callback(lambda y: SEEN.append(scale[0]), x)
        return x * scale[0]

    step = spmd.jit(function, P("x"), mesh=LINE)
    for number in (1.0, 2.0, 3.0):
        scale[0] = number
        assert [number, number] == step(torch.ones(2)).full_tensor().tolist()
    assert [1.0, 1.0, 2.0, 2.0, 3.0, 3.0] == SEEN


def test_equal_calls_outside_share_a_program_and_functions_are_freed() -> None:
    x = spmd.distribute(torch.zeros(2), P("x"), LINE)
    from spmd.api.eager.operator_cache import program_of

    debug.callback(note, x)
    before = program_of.cache_info().misses
    for _ in range(5):
        debug.callback(note, x)
    assert before == program_of.cache_info().misses

    def called() -> weakref.ref[Any]:
        def local(x: torch.Tensor) -> None: ...

        spmd.jit(lambda x: debug.callback(local, x) or x, P("x"), mesh=LINE)(torch.zeros(2))
        return weakref.ref(local)

    held = called()
    gc.collect()
    assert held() is None


class Equal:
    """Callables that compare as equal, and are not the same."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, x: torch.Tensor) -> None:
        SEEN.append(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 0


def test_equal_functions_are_not_the_same() -> None:
    first, second = Equal("first"), Equal("second")

    def function(x: torch.Tensor) -> torch.Tensor:
        for called in (first, second, first):
            debug.callback(called, x)
        return x

    assert ["first"] * 2 + ["second"] * 2 + ["first"] * 2 == calls(spmd.jit(function, P("x"), mesh=LINE), torch.ones(2))


def test_it_returns_nothing() -> None:
    step = spmd.jit(lambda x: debug.callback(len, x) or x, P("x"), mesh=LINE)
    with pytest.raises(
        spmd.SpmdError,
        match=r"len, called by spmd.debug.callback, returned 1, .*Return None.*\n  In .*debug_callback.*test_callbacks",
    ):
        step(torch.zeros(2))


def test_its_errors_name_the_line() -> None:
    def fails(x: torch.Tensor) -> None:
        raise ValueError("no such value")

    with pytest.raises(ValueError, match=r"no such value\n  In .*debug_callback.* at .*test_callbacks.py"):
        spmd.jit(lambda x: debug.callback(fails, x) or x, P("x"), mesh=LINE)(torch.zeros(2))


def test_too_many_tensors() -> None:
    with pytest.raises(spmd.SpmdError, match=r"spmd.debug.callback was given 12 tensors"):
        debug.callback(note, [torch.zeros(2)] * 12)


@pytest.mark.parametrize("length", [8, 5, 1, 0])
def test_pure_results_in_jit_are_those_of_one_device(length: int) -> None:
    x = torch.arange(float(length))
    expected = cubed(x)
    for spec in (P("x"), P(("y", "x")), P()):
        step = spmd.jit(cubed, spec, spec, mesh=GRID)
        assert torch.equal(expected, step(x).full_tensor())
        assert torch.equal(expected, step(x).full_tensor())
    assert torch.equal(expected.sum(), spmd.jit(lambda x: cubed(x).sum(), P("x"), P(), mesh=GRID)(x).full_tensor())
    verify(spmd.jit(cubed, P("x"), P("x"), mesh=GRID).lower(x))


def test_a_pure_function_sees_no_shard_that_changes_its_result() -> None:
    def normalized(x: torch.Tensor) -> torch.Tensor:
        return spmd.pure_callback(lambda x: x / x.sum(), x, x)  # type: ignore[no-any-return]

    x = torch.arange(4.0)
    assert torch.equal(x / 6, spmd.jit(normalized, P("x"), P("x"), mesh=LINE)(x).full_tensor())
    mapped = spmd.shard_map(normalized, LINE, P("x"), P("x"))
    assert torch.equal(torch.tensor([0.0, 1.0, 0.4, 0.6]), mapped(x).full_tensor())
    assert torch.equal(x / 6, normalized(spmd.distribute(x, P("x"), LINE)).full_tensor())  # type: ignore[attr-defined]
    with spmd.disable_jit():
        assert torch.equal(torch.tensor([0.0, 1.0, 0.4, 0.6]), whole(mapped(x)))


def test_pure_results_are_trees() -> None:
    declared = {"sum": torch.empty((), device="meta"), "parts": [TensorMeta((2,), torch.int64)]}

    def function(x: torch.Tensor) -> Any:
        return spmd.pure_callback(lambda x: {"sum": x.sum(), "parts": [numpy.arange(2)]}, declared, x)

    for made in (function, spmd.jit(function, P("x"), mesh=LINE)):
        result = made(torch.ones(4))
        assert (4.0, [0, 1]) == (whole(result["sum"]).item(), whole(result["parts"][0]).tolist())
    assert 3.0 == spmd.jit(lambda: spmd.pure_callback(lambda: 3.0, torch.empty(())), mesh=LINE)().full_tensor().item()


def test_equal_pure_calls_of_other_functions_differ() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [spmd.pure_callback(lambda x, n=n: x + n, x, x) for n in range(3)]

    results = spmd.jit(function, P("x"), P("x"), mesh=LINE)(torch.zeros(2))
    assert [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]] == [x.full_tensor().tolist() for x in results]


def test_unused_pure_results_are_not_computed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        spmd.pure_callback(lambda x: SEEN.append(1), (), x)
        spmd.pure_callback(lambda x: SEEN.append(1) or x, x, x)
        return x

    spmd.jit(function, P("x"), mesh=LINE)(torch.zeros(2))
    assert [] == SEEN


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_pure_functions_under_vmap(method: str) -> None:
    shapes: list[Any] = []

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        shapes.append((tuple(x.shape), tuple(w.shape)))
        return x * w

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return spmd.pure_callback(product, x, x, w, vmap_method=method)  # type: ignore[no-any-return]

    x, w = torch.arange(6.0).view(2, 3), torch.arange(3.0)
    assert torch.equal(x * w, torch.vmap(function, (1, None), 1)(x.T.contiguous().T.view(2, 3).T, w).T)
    expected = {
        "sequential": [((3,), (3,))] * 2,
        "expand_dims": [((2, 3), (1, 3))],
        "broadcast_all": [((2, 3), (2, 3))],
    }
    assert expected[method] == shapes
    batched = torch.vmap(function, (0, None))
    assert torch.equal(x * w, spmd.jit(batched, (P("x"), P()), P("x"), mesh=LINE)(x, w).full_tensor())
    assert torch.equal(x * w, spmd.shard_map(batched, LINE, (P("x"), P()), P("x"), check=False)(x, w).full_tensor())
    outside = torch.vmap(spmd.jit(function, (P(), P()), P(), mesh=LINE), (0, None))
    assert torch.equal(x * w, outside(x, w).full_tensor())


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad(lambda x: cubed(x).sum()),
        lambda x: torch.func.jvp(cubed, (x,), (x,))[1],
        torch.func.jacfwd(cubed),
        lambda x: torch.autograd.grad(cubed(x.detach().requires_grad_()).sum(), x),
    ],
    ids=["grad", "jvp", "jacfwd", "autograd"],
)
def test_pure_functions_have_no_derivative(transform: Callable[..., Any]) -> None:
    for function in (transform, spmd.jit(transform, P("x"), mesh=LINE)):
        with pytest.raises(spmd.SpmdError, match=r"cube, called by spmd.pure_callback, is differentiated.*Function"):
            function(torch.ones(2))
    with pytest.raises(spmd.SpmdError, match=r"is differentiated"):
        spmd.jit(cubed, P("x"), mesh=LINE)(torch.ones(2).requires_grad_()).sum().backward()


def test_a_pure_function_with_a_derivative_of_its_own() -> None:
    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return spmd.pure_callback(cube, x, x, vmap_method="broadcast_all")  # type: ignore[no-any-return]

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return 3 * x * x * g

    def loss(x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(x).sum()  # type: ignore[no-any-return]

    x = torch.arange(4.0)
    for transform in (torch.func.grad(loss), torch.vmap(torch.func.grad(loss))):
        expected = transform(x)
        assert torch.equal(3 * x * x, expected)
        assert torch.equal(expected, spmd.jit(transform, P("x"), P("x"), mesh=LINE)(x).full_tensor())
        assert torch.equal(expected, spmd.shard_map(transform, LINE, P("x"), P("x"))(x).full_tensor())
    detached = torch.func.grad(lambda x: (cubed(x.detach()) * x).sum())
    assert torch.equal(detached(x), spmd.jit(detached, P("x"), P("x"), mesh=LINE)(x).full_tensor())


@pytest.mark.parametrize(
    ("function", "declared", "message"),
    [
        (lambda x: x.double(), TensorMeta((2,), torch.float32), r"returned f64\[2\], where .* has f32\[2\]"),
        (lambda x: x[:1], TensorMeta((2,), torch.float32), r"returned f32\[1\], where .* has f32\[2\]"),
        (lambda x: (x, x), TensorMeta((2,), torch.float32), r"where result_shape_dtypes has"),
        (lambda x: None, TensorMeta((2,), torch.float32), r"where result_shape_dtypes has"),
    ],
)
def test_pure_results_must_be_as_declared(function: Any, declared: Any, message: str) -> None:
    step = spmd.jit(lambda x: spmd.pure_callback(function, declared, x), mesh=LINE)
    with pytest.raises(spmd.SpmdError, match=rf"(?s){message}.*In spmd_host.pure_callback.*test_callbacks.py"):
        step(torch.zeros(2))


def test_mistakes_are_named() -> None:
    with pytest.raises(spmd.SpmdError, match=r"Say how: vmap_method='sequential'"):
        torch.vmap(cubed)(torch.zeros(2))
    with pytest.raises(spmd.SpmdError, match=r"vmap_method must be one of .*\(got 'fast'\)"):
        cubed(torch.zeros(2), "fast")
    with pytest.raises(spmd.SpmdError, match=r"result_shape_dtypes"):
        spmd.pure_callback(cube, 3.0, torch.zeros(2))


def test_the_program_as_a_module_of_fx() -> None:
    mesh = spmd.make_mesh({"x": 1}, runtime="virtual")
    step: Any = spmd.jit(lambda x: noted(spmd.pure_callback(lambda x: x + 1, x, x)), P("x"), mesh=mesh)
    module = step.lower(torch.zeros(2)).graph_module()
    del step
    gc.collect()
    assert [1.0, 1.0] == module(torch.zeros(2))[0].tolist()
    assert [[1.0, 1.0]] == SEEN


def test_a_saved_plan_is_that_of_the_same_function(tmp_path: Any) -> None:
    x = torch.zeros(4)
    step = spmd.jit(lambda x: noted(cubed(x)), P("x"), P("x"), mesh=LINE)
    step.plan(x).save(tmp_path / "plan.json")
    again = spmd.jit(lambda x: noted(cubed(x)), P("x"), P("x"), mesh=LINE, plan=tmp_path / "plan.json")
    assert torch.equal(torch.zeros(4), again(x).full_tensor())
    assert [[0.0, 0.0]] * 2 == SEEN
