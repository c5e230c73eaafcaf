"""What torch traces by itself, inside of a function under jit: right, or refused with its line."""

import copy
import inspect
import threading
import warnings

import pytest
import torch
from interpreter import evaluate
from torch.fx.experimental.proxy_tensor import make_fx

import spmd
from spmd import P
from spmd.core.pytree import tree_leaves
from spmd.tracing.trace import trace

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")
CLOSED = torch.randn(4, 3)
linearize = torch.func.linearize


def product(a, b):
    return a * b, {"sine": a.sin(), "constant": torch.ones(2)}


def of_a_tree(x):
    return linearize(lambda d: d["a"] * d["b"][0], {"a": x, "b": [x.cos()]})[1]({"a": x, "b": [x * 3]})


def called_twice(x):
    output, derivative = linearize(lambda a: (a @ CLOSED.T).tanh(), x)
    return output, derivative(x), derivative(x * x)


def jacobian(x):
    basis = torch.eye(12).reshape(12, 4, 3)
    return torch.func.vmap(linearize(lambda a: (a * a.sum(0)).sin(), x)[1])(basis)


def in_place(x):
    return linearize(lambda a: a.clone().add_(1).mul_(a), x)[1](x)


def of_what_is_closed_over(x):
    return linearize(torch.sin, CLOSED)[1](x)


def of_integers(x):
    return linearize(lambda a: a.argmax(), x)[1](x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: linearize(torch.sin, x)[1](x * 2),
        lambda x: linearize(product, x, x.cos())[1](x, x * 2),
        lambda x: linearize(product, x, x.cos())[0],
        lambda x: linearize(torch.func.grad(lambda r: r.sin().sum()), x)[1](x),
        of_a_tree,
        called_twice,
        jacobian,
        in_place,
        of_what_is_closed_over,
        of_integers,
    ],
)
def test_linearize(function):
    x = torch.randn(4, 3)
    result = spmd.jit(function, P("data"), P(), mesh=MESH)(x)
    for actual, expected in zip(tree_leaves(result), tree_leaves(function(x)), strict=True):
        torch.testing.assert_close(actual.full_tensor(), expected)


def by_linearize(x, t):
    return linearize(lambda a: (a * a).sin(), x)[1](t)


def by_jvp(x, t):
    return torch.func.jvp(lambda a: (a * a).sin(), (x,), (t,))[1]


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x: torch.func.grad(lambda y: f(y, y).sum())(x),
        lambda f: lambda x: torch.func.vmap(f)(x, x),
        lambda f: lambda x: torch.func.jvp(lambda y: f(y, y), (x,), (x,)),
    ],
)
def test_transforms_of_linearize_which_torch_refuses_or_gets_wrong(transform):
    x = torch.randn(4, 3)
    actual = evaluate(trace(transform(by_linearize), (x,)).graph, [x])
    torch.testing.assert_close(list(actual), tree_leaves(transform(by_jvp)(x)))


@pytest.mark.parametrize(
    ("tangents", "text"),
    [
        (lambda x: (x[0],), r"tangent:0 with shape torch.Size\(\[3\]\)"),
        (lambda x: (x.double(),), "tangent:0 with dtype torch.float64"),
        (lambda x: ({"a": x},), "Expected the tangents TreeSpec"),
    ],
)
def test_tangents_that_do_not_fit_are_refused_as_torch_does(tangents, text):
    function = lambda x: linearize(torch.sin, x)[1](*tangents(x))  # noqa: E731
    for run in (function, lambda x: trace(function, (x,))):
        with pytest.raises(RuntimeError, match=text):
            run(torch.randn(4, 3))


def test_other_threads_have_torchs_own_linearize():
    found = []

    def elsewhere():
        found.append(linearize(torch.sin, CLOSED)[1](CLOSED))

    def function(x):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return x

    trace(function, (CLOSED,))
    assert torch.equal(CLOSED.cos() * CLOSED, found[0])


@torch.compile(backend="aot_eager")
def compiled(x):
    return (x.sin() * 2 + x).cos()


def steps(x: torch.Tensor):
    y = x.sin()
    y += 1
    return y * 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # both are deprecated
    scripted = torch.jit.script(steps)
    traced = torch.jit.trace(lambda x: x.cos() * 3, torch.ones(4, 3))


@pytest.mark.parametrize(
    "function",
    [
        compiled,
        torch.func.grad(lambda x: compiled(x).sum()),
        torch.func.vmap(compiled),
        scripted,
        torch.func.grad(lambda x: scripted(x).sum()),
        torch.func.vmap(scripted),
        traced,
        torch.func.functionalize(lambda x: x.clone()[0].add_(1), remove="mutations_and_views"),
        torch.func.functionalize(torch.func.grad(lambda x: (x.clone().mul_(2) * x).sum())),
        lambda x: torch.cond(x.shape[0] > 2, torch.sin, torch.cos, (x,)),
        lambda x: copy.deepcopy(x) * 2,
    ],
)
@pytest.mark.filterwarnings("ignore:Pred is a Python constant")
def test_what_torch_compiles_runs_as_it_stands(function):
    x = torch.randn(4, 3)
    (actual,) = evaluate(trace(function, (x,)).graph, [x])
    torch.testing.assert_close(actual, function(x))


def records(x):
    return make_fx(torch.sin)(x)(x * 3)


def runs_strictly(x):
    return torch._higher_order_ops.strict_mode(torch.sin, (x,))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (records, "make_fx"),
        (runs_strictly, "torch.ops.higher_order.strict_mode"),
    ],
)
def test_what_would_record_constants_is_refused(function, text, caplog):
    with pytest.raises(spmd.TraceError) as error:
        trace(function, (CLOSED,))
    (line,) = [line for line in inspect.getsource(function).splitlines() if line.startswith("    return")]
    assert f"{text} at test_nested_tracers.py:" in str(error.value)
    assert f"(`{line.strip()}`)" in str(error.value)
    assert [] == [record for record in caplog.records if record.levelno >= 30]


@pytest.mark.parametrize(
    "transform",
    [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian, lambda f: torch.func.vmap(torch.func.grad(f))],
)
def test_transforms_of_what_is_closed_over(transform):
    function = transform(lambda a: (a.sin() * a.sum()).sum())
    result = spmd.jit(lambda x: function(CLOSED) + function(x), P("data"), P(), mesh=MESH)(CLOSED.cos())
    torch.testing.assert_close(result.full_tensor(), function(CLOSED) + function(CLOSED.cos()))


def test_jacobian_of_distances():
    """Torch's own is wrong: its rule for vmap gives every cotangent the gradient of the sum of all."""
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    wrong = torch.func.jacrev(lambda a: torch.cdist(a, y))
    with pytest.raises(spmd.TraceError, match=r"cdist at test_nested_tracers.py:\d+ .* for several cotangents"):
        spmd.jit(wrong, P("data"), P(), mesh=MESH)(x)
    right = torch.func.jacrev(lambda a: torch.linalg.vector_norm(a[:, None] - y, dim=-1))
    expected = torch.autograd.functional.jacobian(lambda a: torch.cdist(a, y), x)
    torch.testing.assert_close(spmd.jit(right, P("data"), P(), mesh=MESH)(x).full_tensor(), expected)
