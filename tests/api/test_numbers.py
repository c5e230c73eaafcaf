"""Python values among the arguments of jitted functions: floats are dynamic, ints and others static."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import numpy
import pytest
import torch

import spmd
from spmd import P, full_tree
from spmd.core.pytree import tree_leaves
from spmd.errors import TraceError

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")


def values(seed=0, *shape, dtype=torch.float32):
    return torch.randn(shape or (6, 4), generator=torch.Generator().manual_seed(seed)).to(dtype)


def placed(x, *dims):
    return spmd.distribute(x, P(*dims), MESH)


def equal(found, expected):
    """Whether a tree of results is that of one device, with its dtypes."""
    found, expected = (spmd.core.pytree.tree_leaves(tree) for tree in (found, expected))
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            torch.testing.assert_close(one.full_tensor(), other, equal_nan=True)
        else:
            assert type(one) is type(other) and (one == other or (one != one and other != other))


def traced_times(function):
    """A function, and the list that grows whenever Python runs it."""
    calls = []

    @functools.wraps(function)
    def counted(*args):
        calls.append(1)
        return function(*args)

    return counted, calls


OPERATIONS = {
    "mul": lambda x, a: x * a,
    "rmul": lambda x, a: a * x,
    "rsub": lambda x, a: a - x,
    "rdiv": lambda x, a: a / (x * x + 1),
    "floor": lambda x, a: torch.div(x, a, rounding_mode="floor"),
    "remainder": lambda x, a: x % a,
    "power": lambda x, a: (x * x + 1) ** a,
    "exponent": lambda x, a: a**x,
    "alpha": lambda x, a: torch.add(x, x.sin(), alpha=a),
    "addcmul": lambda x, a: torch.addcmul(x, x, x, value=a),
    "lerp": lambda x, a: torch.lerp(x, x.cos(), a),
    "addmm": lambda x, a: torch.addmm(x[:, 0], x, x.T[:, :6], beta=a, alpha=2 * a),
    "full": lambda x, a: x * torch.full((4,), a),
    "full_like": lambda x, a: x * torch.full_like(x, a),
    "tensor": lambda x, a: x * torch.tensor(a) + torch.tensor([a, 1.0, a * a, 2]),
    "as_tensor": lambda x, a: x * torch.as_tensor(a, dtype=x.dtype),
    "where": lambda x, a: torch.where(x > a, x, a),
    "where_two": lambda x, a: torch.where(x > 0, a, 0.0) * x,
    "masked_fill": lambda x, a: x.masked_fill(x > 0, a),
    "clamp": lambda x, a: x.clamp(-a, a),
    "clamp_max": lambda x, a: x.clamp(max=a),
    "leaky_relu": lambda x, a: torch.nn.functional.leaky_relu(x, a),
    "softplus": lambda x, a: torch.nn.functional.softplus(x, beta=a),
    "setitem": lambda x, a: torch.cat([x, x.new_full((6, 1), a)], 1),
    "sum": lambda x, a: (x * sum([a, a, 1])).sum(0) + a,
    "mean": lambda x, a: (a * x).mean(),
    "python": lambda x, a: x * (((1 - a) * 3 + a / 7 - a**2) * abs(-a)),
    "foreach": lambda x, a: torch._foreach_add(torch._foreach_mul([x, x.sin()], a), [x, x], alpha=a),
    "matmul": lambda x, a: (a * x) @ x.T,
    "logsumexp": lambda x, a: torch.logsumexp(x / a, 1),
    "softmax": lambda x, a: torch.softmax(x * a, -1),
    "norm": lambda x, a: torch.linalg.vector_norm(x + a, dim=1),
    "xlogy": lambda x, a: torch.xlogy(a, x * x + 1),
    "linspace": lambda x, a: x * torch.linspace(0, a, 4),
    "max": lambda x, a: (x.amax(0) * a).sum() + (x * a).amax(),
    "numpy": lambda x, a: x * (numpy.float64(2) * a) + (a - numpy.float64(1)) / numpy.float64(3),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_float_is_dynamic_and_derivatives_are_those_of_one_device(name) -> None:
    function, calls = traced_times(OPERATIONS[name])
    jitted, x = spmd.jit(function, mesh=MESH), values()
    for a in (0.3, 1.7, 0.125):
        equal(jitted(placed(x, "data"), a), OPERATIONS[name](x, a))
    assert calls == [1]

    def loss(x, a):
        found = spmd.core.pytree.tree_leaves(OPERATIONS[name](x, a))
        return sum(leaf.square().sum() for leaf in found)

    step, calls = traced_times(torch.func.grad_and_value(loss))
    jitted = spmd.jit(step, mesh=MESH)
    for a in (0.3, 1.7, 0.125):
        equal(jitted(placed(x, "data"), a), torch.func.grad_and_value(loss)(x, a))
    assert calls == [1]


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "foreach"])
def test_transforms_inside_pass_numbers_on(name) -> None:
    def function(xs, a):
        call = lambda x: tuple(spmd.core.pytree.tree_leaves(OPERATIONS[name](x, a)))  # noqa: E731
        return torch.func.vmap(call)(xs), torch.func.jvp(call, (xs[0],), (xs[1],))

    counted, calls = traced_times(function)
    jitted, x = spmd.jit(counted, mesh=MESH), values(0, 2, 6, 4)
    for a in (0.3, 0.8):
        equal(jitted(placed(x, None, "data"), a), function(x, a))
    assert calls == [1]
    scalars = lambda x, a: torch.func.vmap(torch.func.grad(lambda x: (a * x + a) * (x - a)))(x)  # noqa: E731
    equal(spmd.jit(scalars, mesh=MESH)(x[0, 0], 0.3), scalars(x[0, 0], 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(6, 4), ()], ids=str)
def test_a_float_promotes_as_a_python_number(dtype, shape) -> None:
    x = (torch.arange(24).reshape(6, 4) if shape else torch.tensor(3)).to(dtype)
    function = lambda x, a: (x * a, a - x.to(torch.float32), torch.where(x > 1, x, a), x > a, (x + a) * a)  # noqa: E731
    jitted = spmd.jit(function, mesh=MESH)
    for a in (0.1, 2.5):
        equal(jitted(x, a), function(x, a))
    with torch.autocast("cpu", torch.bfloat16):
        function = lambda x, a: ((x * a).float() @ torch.ones(4, 4)) * a if x.ndim else x * a  # noqa: E731
        jitted = spmd.jit(function, mesh=MESH)
        equal(jitted(x, 0.1), function(x, 0.1))


@pytest.mark.parametrize("a", [math.nan, math.inf, -math.inf, -0.0, 0.0, 5e-324, 1e300])
def test_special_values_are_given_as_they_are(a) -> None:
    function = lambda x, a: (x * a, x + a, torch.full((2,), a, dtype=torch.float64), a, a * 2)  # noqa: E731
    jitted, x = spmd.jit(function, mesh=MESH), values(dtype=torch.float64)
    equal(jitted(x, 1.0), function(x, 1.0))
    found, expected = jitted(x, a), function(x, a)
    equal(found, expected)
    assert math.copysign(1, found[3]) == math.copysign(1, expected[3])
    assert torch.equal(found[2].full_tensor().signbit(), expected[2].signbit())


def test_a_hundred_values_of_a_float_are_one_trace() -> None:
    function, calls = traced_times(lambda x, a: x * a)
    jitted, x = spmd.jit(function, P("data"), mesh=MESH), placed(values(), "data")
    for step in range(100):
        equal(jitted(x, 0.01 * step), values() * (0.01 * step))
    assert (calls, jitted.cache_info()) == ([1], (99, 1, 128, 1))


def test_numbers_in_trees_by_name_and_of_numpy() -> None:
    function, calls = traced_times(lambda x, config: x * config["lr"] + config["n"] * config["eps"])
    jitted, x = spmd.jit(function, mesh=MESH), values()
    for lr in (0.1, 0.2, numpy.float64(0.3), numpy.float32(0.5)):
        config = {"lr": lr, "eps": 0.25, "n": 3, "name": "x", "dtype": torch.float32, "none": None}
        equal(jitted(x, config), x * float(lr) + 0.75)
    assert calls == [1]
    by_name = spmd.jit(lambda x, *, lr=0.1: x * lr, mesh=MESH)
    equal([by_name(x), by_name(x, lr=0.5), by_name(x, lr=0.25)], [x * 0.1, x * 0.5, x * 0.25])


def test_a_float_may_be_static() -> None:
    function, calls = traced_times(lambda x, a: x * a)
    jitted, x = spmd.jit(function, mesh=MESH, static_argnums=1), values()
    for a in (0.1, 0.2, 0.1):
        equal(jitted(x, a), x * a)
    assert calls == [1, 1]


def test_specs_say_nothing_of_numbers() -> None:
    x = values()
    for specs in (P("data"), (P("data"), None), (P("data"), P()), {"x": P("data")}):
        equal(spmd.jit(lambda x, a: (x * a, a), specs, mesh=MESH)(x, 0.5), (x * 0.5, 0.5))
    equal(spmd.jit(lambda x, a: (x * a, a), out_specs=(P("model"), P()), mesh=MESH)(x, 0.5), (x * 0.5, 0.5))


def branch(x, a):
    return x + 1 if a > 0.5 else x * a  # the line of the branch


def exact(x, a):
    return x * math.exp(a)  # the line of exp


def line_of(mark):
    with open(__file__) as lines:
        return next(number for number, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {mark}"))


def test_a_branch_is_a_guard_and_warns_at_its_line_once() -> None:
    function, calls = traced_times(branch)
    jitted, x = spmd.jit(function, mesh=MESH), values()
    equal([jitted(x, 0.1), jitted(x, 0.2)], [x * 0.1, x * 0.2])
    with pytest.warns(UserWarning, match=r"Python needs the value of \(a > 0.5\) here") as caught:
        equal(jitted(x, 0.7), x + 1)
    assert [(found.filename, found.lineno) for found in caught] == [(__file__, line_of("the line of the branch"))]
    for a in (0.3, 0.8, 0.4, 0.9):
        equal(jitted(x, a), branch(x, a))
    assert calls == [1, 1]


def test_a_value_that_python_computes_with_is_a_program_each() -> None:
    function, calls = traced_times(exact)
    jitted, x = spmd.jit(function, mesh=MESH), values()
    equal([jitted(x, 0.1), jitted(x, 0.1)], [exact(x, 0.1)] * 2)
    with pytest.warns(UserWarning, match="Python needs the value of a here") as caught:
        equal([jitted(x, a) for a in (0.2, 0.3, 0.1, -0.0, 0.0)], [exact(x, a) for a in (0.2, 0.3, 0.1, -0.0, 0.0)])
    assert [found.lineno for found in caught] == [line_of("the line of exp")]
    assert calls == [1] * 5


def test_an_error_for_one_value_is_not_that_of_another() -> None:
    def function(x, a):
        if a < 0:
            raise ValueError("negative")
        return x * a

    jitted, x = spmd.jit(function, mesh=MESH), values()
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            jitted(x, -1.0)
        equal(jitted(x, 1.0), x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a: x * float(a),
        lambda x, a: x * max(a, 0.25),
        lambda x, a: x[: int(a * 10)],
        lambda x, a: x * {True: 1.0, False: a}[a == 0.5],
        lambda x, a: torch.nn.functional.layer_norm(x, (4,), eps=a),
        lambda x, a: x.sum() + torch.arange(0, 1, a).sum(),
        lambda x, a: x * (a // 0.2) + round(a, 1) + math.floor(a),
        lambda x, a: x * complex(0, a).imag if a else x,
        lambda x, a: x * (a - 1) ** 2,
        lambda x, a: (x, f"{a:.2f}"),
        lambda x, a: (x * float(str(a)), f"{a}"),
        lambda x, a: x * float(numpy.sqrt(a) + numpy.exp(-a)) + numpy.interp(a, [0.0, 1.0], [2.0, 3.0]),
        lambda x, a: x * (numpy.array([1.0, 2.0]) * a).sum().item() + numpy.float32(a).item(),
        lambda x, a: x * (1j * a),
    ],
)
def test_what_needs_values_holds_for_these_values_only(function) -> None:
    jitted, x = spmd.jit(function, mesh=MESH), values()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for a in (0.5, 0.3, 0.2, 0.5, 1.5):
            equal(jitted(x, a), function(x, a))


def test_an_int_of_many_values_warns_at_its_call() -> None:
    jitted, x = spmd.jit(lambda x, step: x * step, mesh=MESH), values()
    for step in range(8):
        equal(jitted(x, step), x * step)
    with pytest.warns(UserWarning, match=r"Argument 1 of spmd.jit\(.*\) is an int.*float\(8\)") as caught:
        for step in range(8, 12):
            equal(jitted(x, step), x * step)
    assert [found.filename for found in caught] == [__file__]
    equal(jitted(x, True), x * True)


@pytest.mark.parametrize("field", [True, False], ids=["of a dataclass", "of a dict"])
def test_an_int_of_many_values_in_a_container_warns(field: bool) -> None:
    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    if field:
        jitted = spmd.jit(lambda x, states: x * states[0].step, mesh=mesh)
    else:
        jitted = spmd.jit(lambda x, states: x * states[0]["step"], mesh=mesh)
    call = lambda step: jitted(torch.ones(2), [Counted(torch.ones(2), step) if field else {"step": step}])  # noqa: E731
    for step in range(8):
        call(step)
    path = r"1\[0\]\.step" if field else r"1\[0\]\['step'\]"
    with pytest.warns(UserWarning, match=rf"Argument {path} of spmd.jit\(.*\) is an int.*float\(8\)") as caught:
        for step in range(8, 12):
            call(step)
    assert [found.filename for found in caught] == [__file__]


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda x, a: x * 2 if a else -x, [True, False]),
        (lambda x, a: (x * a).imag + x, [1j, 2 + 3j, 0j]),
        (lambda x, a: getattr(torch, a)(x), ["sin", "cos"]),
        (lambda x, a: x if a is None else x * a, [None, 3]),
        (lambda x, a: x.to(a) * 2, [torch.float16, torch.float32, torch.int64]),
        (lambda x, a: torch.zeros(3, device=a) + x.sum(), [torch.device("cpu")]),
        (lambda x, a: x.sum(a), [(0,), (0, 1)]),
    ],
    ids=["bool", "complex", "str", "None", "dtype", "device", "tuple of ints"],
)
def test_other_values_are_static(function, given) -> None:
    counted, calls = traced_times(function)
    jitted, x = spmd.jit(counted, mesh=MESH), values()
    for value in (*given, *given):
        equal(jitted(x, value), function(x, value))
    assert len(calls) == len(given)
    if not any(isinstance(value, (complex, torch.dtype)) for value in given):
        for value in given:
            loss = lambda x: function(x, value).square().sum()  # noqa: B023, E731
            found = torch.func.grad(lambda x: jitted(x, value).square().sum())(placed(x, "data"))  # noqa: B023
            equal(found, torch.func.grad(loss)(x))


@pytest.mark.filterwarnings("ignore:Python needs the value")
def test_gradients_of_branches_and_of_what_needs_values() -> None:
    for function in (branch, exact):
        step = torch.func.grad(lambda x, a: function(x, a).square().sum())  # noqa: B023
        jitted = spmd.jit(step, mesh=MESH)
        for a in (0.1, 0.7, 0.3):
            equal(jitted(placed(values(), "data"), a), step(values(), a))


def test_gradients_where_operands_are_arrays_of_numpy() -> None:
    x, w = values(0, 5, 4), values(1, 4, 4)
    loss = lambda x, w: (x @ w).sin().sum()  # noqa: E731
    jitted, leaf = spmd.jit(loss, (P("data"), None), mesh=MESH), placed(x, "data").requires_grad_()
    jitted(leaf, w.numpy()).backward()
    equal(leaf.grad, torch.func.grad(loss)(x, w))
    both = torch.func.grad(loss, argnums=(0, 1))
    equal(spmd.jit(both, mesh=MESH)(x.numpy(), w.numpy()), both(x, w))


def test_numpy_arrays_are_tensors() -> None:
    x, w = values(), values(1, 4, 4)
    jitted = spmd.jit(lambda x, w: x @ w, (P("data"), None), mesh=MESH)
    for array in (w.numpy(), w.numpy()[::-1], numpy.asfortranarray(w.numpy())):
        equal(jitted(x, array), x @ torch.from_numpy(array.copy()))
    held = w.numpy().copy()
    held.flags.writeable = False
    equal(jitted(x.numpy(), held), x @ w)
    equal(spmd.jit(lambda x, n: x * n, mesh=MESH)(x, numpy.int64(3)), x * 3)


def test_results_may_be_numbers() -> None:
    function = lambda x, a, n: {"x": x * a, "a": a, "b": a * n + 1, "n": n, "c": 1.5, "flag": True, "s": "s"}  # noqa: E731
    jitted, x = spmd.jit(function, mesh=MESH), values()
    for a in (0.5, 0.25):
        equal(jitted(x, a, 3), function(x, a, 3))
    assert spmd.jit(lambda a: a * 2, mesh=MESH)(1.5) == 3.0


def test_numbers_pass_through_functions_that_are_called_inside() -> None:
    inner = spmd.jit(lambda x, a: (x * a, a), (P("data"), P()), (P("data"), None), mesh=MESH)
    function, calls = traced_times(lambda x, a: inner(inner(x, a)[0], 2 * a)[0] + inner(x, 0.5)[0])
    jitted, x = spmd.jit(function, mesh=MESH), values()
    for a in (0.5, 0.25):
        equal(jitted(x, a), x * 2 * a * a + 0.5 * x)
    assert calls == [1]


def test_bodies_of_shard_map_read_numbers() -> None:
    def function(x, a):
        body = lambda x: spmd.collectives.psum(x * a, "data") + a  # noqa: E731
        return spmd.shard_map(body, MESH, P("data"), P())(x)

    jitted, x = spmd.jit(function, mesh=MESH), values()
    for a in (0.5, 0.25):
        equal(jitted(x, a), (x[:3] + x[3:]) * a + a)


def test_programs_and_plans_show_numbers(tmp_path) -> None:
    jitted, x = spmd.jit(lambda x, rate: x * (rate * 2), P("data"), mesh=MESH), values()
    text = jitted.lower(x, 0.1).as_text()
    assert "rate,  # float" in text and "(rate * 2)" in text
    plan = jitted.plan(x, 0.1)
    assert str(plan)
    plan.save(tmp_path / "plan.json")
    other = spmd.jit(lambda x, rate: x * (rate * 2), P("data"), mesh=MESH, plan=tmp_path / "plan.json")
    for a in (0.1, 0.7):
        equal(other(x, a), x * (a * 2))


def test_numbers_without_compilation() -> None:
    jitted, x = spmd.jit(lambda x, a, n: (x * a, a * 2, n), P("data"), mesh=MESH), values()
    with spmd.disable_jit():
        equal(jitted(x, 0.5, 3), (x * 0.5, 1.0, 3))


def test_transforms_from_outside_take_numbers() -> None:
    function = lambda x, a: (x * a).sin().sum()  # noqa: E731
    jitted, x = spmd.jit(function, mesh=MESH), values()
    for a in (0.5, 0.25):
        equal(torch.func.grad(jitted)(placed(x, "data"), a), torch.func.grad(function)(x, a))
        equal(torch.func.vmap(jitted, (0, None))(placed(x, "data"), a), torch.func.vmap(function, (0, None))(x, a))
        leaf = placed(x, "data").requires_grad_()
        jitted(leaf, a).backward()
        equal(leaf.grad, torch.func.grad(function)(x, a))


def test_transforms_from_outside_warn_of_many_values() -> None:
    jitted, x = spmd.jit(lambda x, a: (x * a).sum(), mesh=MESH), placed(values(0, 2), None)
    for number in range(8):
        torch.func.grad(jitted)(x, number / 8)
    with pytest.warns(UserWarning, match="the 9th value of its numbers: .* Pass them as tensors") as caught:
        torch.func.grad(jitted)(x, 1.5)
        torch.func.grad(jitted)(x, 2.5)
    assert [found.filename for found in caught] == [__file__]


def test_a_compiled_function_is_for_its_values() -> None:
    jitted, x = spmd.jit(branch, mesh=MESH), values()
    compiled = jitted.compile(x, 0.1)
    equal(compiled(x, 0.3), x * 0.3)
    with pytest.raises(TraceError, match="compiled for other values"):
        compiled(x, 0.7)


def test_a_plan_with_another_value_before_the_call() -> None:
    function, calls = traced_times(branch)
    jitted, x = spmd.jit(function, mesh=MESH), values()
    jitted.trace(x, 0.1)
    jitted.plan(x, 0.2)
    equal(jitted(x, 0.3), x * 0.3)
    assert calls == [1]


OPTIMIZERS = {
    "adamw": (lambda lr: spmd.optim.adamw(lr, weight_decay=0.01), "_fused_adamw"),
    "adam": (lambda lr: spmd.optim.adamw(lr * 0.5), "_fused_adam"),
    "sgd": (lambda lr: spmd.optim.sgd(lr, weight_decay=0.1), None),
    "momentum": (lambda lr: spmd.optim.sgd(lr, 0.9, nesterov=True), "_fused_sgd"),
    "clipped": (lambda lr: spmd.optim.clip_by_global_norm(0.5, spmd.optim.adamw(lr)), "_fused_adam"),
    "decay": (lambda lr: spmd.optim.adamw(0.01, weight_decay=lr), "_fused_adam"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_schedule_of_learning_rates_is_one_trace_with_the_fused_optimizer(name) -> None:
    make, fused = OPTIMIZERS[name]
    x, y = values(0, 8, 4), values(1, 8, 3)

    def step(params, state, x, y, lr):
        loss = lambda params: (x @ params["w"] + params["b"] - y).square().mean()  # noqa: E731
        return (*make(lr).step(params, state, torch.func.grad(loss)(params)), lr)

    def train(step):
        params = {"w": values(2, 4, 3), "b": torch.zeros(3)}
        state = make(0.1).init(params)
        for number in range(20):
            params, state, _ = step(params, state, x, y, 0.05 * (1 + math.cos(number / 6)))
        return params, state

    counted, calls = traced_times(step)
    jitted = spmd.jit(counted, (P(), P(), P("data"), P("data"), None), P(), mesh=MESH)
    equal(train(jitted), train(step))
    assert calls == [1]
    plan = jitted.plan(*train(jitted), x, y, 0.1)
    found = {operation.name for operation in plan.graph.operations if "fused" in operation.name}
    assert found == ({fused} if fused else set())


@dataclasses.dataclass
class Schedule:
    params: torch.Tensor
    lr: float
    betas: tuple[float, float] = (0.9, 0.5)
    nested: Any = None


@dataclasses.dataclass
class Counted:
    w: torch.Tensor
    step: int


class Settings(NamedTuple):
    lr: float
    step: int


@attrs.frozen
class Own:
    w: torch.Tensor
    scale: float


CONTAINERS: list[tuple[Callable[..., Any], Callable[[float], Any], Any]] = [
    (
        lambda s: dataclasses.replace(s, params=s.params * s.lr * s.betas[1], lr=s.lr / 2, nested=s.nested["decay"]),
        lambda lr: Schedule(torch.ones(5, 2), lr, (lr, lr * 2), {"decay": lr + 1}),
        {"params": P("data")},
    ),
    (lambda own: Own(own.w.sin() ** own.scale, own.scale), lambda lr: Own(torch.ones(5), lr), Own(P("data"), 0.0)),
    (lambda s: (torch.ones(3) * s.lr, s), lambda lr: Settings(lr, 3), None),
    (lambda d: {"w": d["w"] + d["opt"][0], "opt": d["opt"]}, lambda lr: {"w": torch.ones(5), "opt": [lr]}, None),
]


@pytest.mark.parametrize(("function", "make", "specs"), CONTAINERS)
def test_a_hundred_values_in_a_container_are_one_trace(function: Any, make: Any, specs: Any) -> None:
    traces = []

    def counted(argument: Any) -> Any:
        traces.append(1)
        return function(argument)

    jitted = spmd.jit(counted, (specs,), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))
    for number in range(100):
        lr = 0.5 + number / 100
        found, expected = full_tree(jitted(make(lr))), function(make(lr))
        assert type(expected) is type(found)
        torch.testing.assert_close(tree_leaves(found), tree_leaves(expected))
    assert 1 == len(traces) == jitted.cache_info().misses


def test_floats_in_trees_stay_when_their_tensors_are_placed() -> None:
    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    placed = spmd.distribute(Schedule(torch.ones(5, 2), 0.5), P("data"), mesh)
    assert (P("data"), 0.5, (0.9, 0.5)) == (placed.params.spec.pspec, placed.lr, placed.betas)
    gradient = spmd.jit(lambda s: torch.func.grad(lambda x: (x * s.lr).sin().sum())(s.params), mesh=mesh)
    torch.testing.assert_close(gradient(placed).full_tensor(), 0.5 * (torch.ones(5, 2) * 0.5).cos())


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside of jit"])
@pytest.mark.parametrize("spec", [None, P()], ids=str)
def test_floats_are_dynamic_arguments_of_shard_map(spec: Any, inside: bool) -> None:
    mesh, traces = spmd.make_mesh({"data": 2}, runtime="virtual"), []

    def body(state: Any, x: torch.Tensor) -> Any:
        traces.append(1)
        loss = lambda w: spmd.collectives.psum((w * state["lr"] * x).sin().sum(), "data")  # noqa: E731
        return torch.func.grad(loss)(state["w"])

    step = spmd.shard_map(body, mesh, ({"w": P("data"), "lr": spec}, P("data")), P("data"))
    if inside:
        step = spmd.jit(step, mesh=mesh)
    for lr in (0.5, 0.25, 2.0):
        found = step({"w": torch.ones(4), "lr": lr}, torch.arange(4.0)).full_tensor()
        torch.testing.assert_close(found, lr * torch.arange(4.0) * (lr * torch.arange(4.0)).cos())
    assert 1 == len(traces)
