"""Memory layouts: values never depend on strides, in operators whose kernels read them and in views by strides."""

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import P, TraceError
from spmd.lowering.passes.layouts import insert_layout_copies
from spmd.tracing.trace import trace

X, WIDE, BATCH = torch.randn(4, 6), torch.randn(8, 6, 4), torch.randn(8, 2, 16, 6)
CLOSED = torch.arange(24.0).view(4, 6).t()[1:]
RECURRENT = {name: getattr(torch.nn, name)(4, 4, batch_first=True) for name in ("LSTM", "GRU", "RNN")}


def recurrent(name):
    module = RECURRENT[name]
    return lambda x: torch.func.functional_call(module, dict(module.named_parameters()), (x,))[0]


def attention(x):
    q = x.transpose(-1, -2).contiguous()
    return F.scaled_dot_product_attention(q, q, q)


def written(x):
    y = x * 1
    y.as_strided((3, 2), (2, 3), 1).mul_(2.0)
    return y.t().contiguous()


FUNCTIONS = {
    "lstm": (recurrent("LSTM"), WIDE),
    "gru": (recurrent("GRU"), WIDE),
    "rnn": (recurrent("RNN"), WIDE),
    "attention": (attention, BATCH),
    "attention of a view": (lambda x: F.scaled_dot_product_attention(*[x.mT.relu()] * 3), BATCH),
    "view_as_complex": (lambda x: torch.view_as_complex(x.transpose(0, 2).contiguous()[..., :2]).abs(), WIDE),
    "view_as_real": (lambda x: torch.view_as_real(torch.complex(x, x)).transpose(0, 2), WIDE),
    "group_norm": (lambda x: F.group_norm(x.transpose(1, 2), 2), WIDE),
    "as_strided": (lambda x: x.t().contiguous().as_strided((3, 2), (2, 3), 1), X),
    "as_strided of a view": (lambda x: x[1:].t().as_strided((3, 2), (2, 3), 8), X),
    "as_strided beyond its operand": (lambda x: x[1:].t().as_strided((3, 2), (2, 3), 1), X),
    "as_strided twice": (lambda x: x.t().as_strided((3, 2), (2, 3), 1).as_strided((2, 2), (5, 3), 2), X),
    "as_strided that overlaps": (lambda x: x.as_strided((4, 3), (1, 1)), X),
    "as_strided of nothing": (lambda x: x.as_strided((0, 3), (1, 1)), X),
    "as_strided of a closed-over tensor": (lambda x: CLOSED.as_strided((2, 3), (6, 1), 1) * x[:2, :3], X),
    "a write by as_strided": (written, X),
    "channels last": (lambda x: F.conv2d(x.to(memory_format=torch.channels_last), torch.ones(2, 2, 2, 2)), BATCH),
    "dtype view": (lambda x: x.double().t().contiguous().view(torch.complex128).abs(), X),
}


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name, spec):
    function, x = FUNCTIONS[name]
    mesh = spmd.make_mesh({"x": 3}, runtime="virtual")

    def both(x):
        return function(x), torch.func.grad(lambda x: function(x).sin().sum())(x)

    for actual, expected in zip(spmd.jit(both, spec, P(), mesh=mesh)(x), both(x), strict=True):
        torch.testing.assert_close(actual.full_tensor(), expected)


@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_of_recurrent_weights(name):
    module, mesh = RECURRENT[name], spmd.make_mesh({"x": 2}, runtime="virtual")
    weights = {key: value.detach() for key, value in module.named_parameters()}

    def gradients(weights, x):
        loss = lambda weights: torch.func.functional_call(module, weights, (x,))[0].sin().sum()  # noqa: E731
        return torch.func.grad(loss)(weights)

    expected = gradients(weights, WIDE)
    actual = spmd.jit(gradients, (P(), P("x")), P(), mesh=mesh)(weights, WIDE)
    for key, value in expected.items():
        torch.testing.assert_close(actual[key].full_tensor(), value)


@pytest.mark.parametrize("name", ["lstm", "attention", "view_as_complex", "group_norm"])
def test_a_shard_may_have_any_strides(name):
    """Results of one call, transposed in memory, are arguments of the next."""
    function, x = FUNCTIONS[name]
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    turned = spmd.jit(lambda x: x.transpose(-1, -2), P("x"), P("x"), mesh=mesh)(x.mT.contiguous())
    assert not turned.shards[0].is_contiguous()
    actual = spmd.jit(function, P("x"), P(), mesh=mesh)(turned).full_tensor()
    torch.testing.assert_close(actual, function(x))


def test_arguments_are_contiguous_when_traced():
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    seen = []

    def function(x):
        seen.append(x.is_contiguous())
        return x.view(-1)

    actual = spmd.jit(function, P(), P(), mesh=mesh)(X.t())
    assert torch.equal(actual.full_tensor(), X.t().reshape(-1))
    assert [True] == seen


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
def test_an_expanded_index_of_int32(spec):
    index, mesh = torch.tensor([[3], [0], [2]], dtype=torch.int32), spmd.make_mesh({"x": 3}, runtime="virtual")
    gathered = spmd.jit(lambda x, i: torch.gather(x, 0, i.expand(3, 6)), (spec, P()), P(), mesh=mesh)(X, index)
    torch.testing.assert_close(gathered.full_tensor(), X[[3, 0, 2]])


def test_memory_that_no_tensor_of_the_program_holds_is_refused():
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    with pytest.raises(TraceError, match=r"as_strided.*test_memory_layouts.py.*reaches elements outside"):
        spmd.jit(lambda x: CLOSED.as_strided((2, 3), (3, 5), 0) * x[:2, :3], P(), P(), mesh=mesh)(X)


def test_a_copy_is_made_once_for_all_that_need_it():
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")

    def function(x):
        q = x.mT.contiguous()
        return F.scaled_dot_product_attention(q, q, q)

    text = spmd.jit(function, P("x"), P("x"), mesh=mesh).lower(BATCH).as_text()
    assert 1 == text.count("= rows(")


def test_the_pass_is_pure_of_operators_that_take_any_layout():
    graph = trace(lambda x: torch.ops.aten.mm.default(x, x), (torch.ones(2, 2),)).graph
    assert insert_layout_copies(graph) is graph
