"""torch.autograd.Functions that call collectives, in a shard_map body, and gradients inside and outside of it."""

import pytest
import torch

import spmd
from spmd import P
from spmd.collectives import axis_index, pcast, ppermute, psum


class Shifted(torch.autograd.Function):
    """x of the rank before, times the index of this rank."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return ppermute(x, "x", pairs(1)) * axis_index("x")

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return ppermute(g * axis_index("x"), "x", pairs(-1))


def pairs(shift):
    return [(rank, (rank + shift) % 4) for rank in range(4)]


def expected(x):
    shards = x.chunk(4)
    return torch.cat([shards[rank - 1] * rank for rank in range(4)])


@pytest.fixture
def mesh():
    return spmd.make_mesh({"x": 4}, runtime="virtual")


def outside(mesh):
    shifted = spmd.shard_map(Shifted.apply, mesh, P("x"), P("x"))
    return torch.func.grad(lambda x: shifted(x).square().sum())


def inside(mesh):
    def body(x):
        return torch.func.grad(lambda x: psum(Shifted.apply(x).square().sum(), "x"))(x)

    return spmd.shard_map(body, mesh, P("x"), P("x"))


def second_order(mesh):
    first = outside(mesh)
    return torch.func.grad(lambda x: first(x).sin().sum())


@pytest.mark.parametrize("transform", [outside, inside, second_order], ids=lambda function: function.__name__)
@pytest.mark.parametrize("jitted", [False, True], ids=["alone", "jit"])
def test_gradients_are_those_of_one_device(mesh, transform, jitted):
    x = torch.randn(8, 3, dtype=torch.float64)
    first = torch.func.grad(lambda x: expected(x).square().sum())
    wanted = {second_order: torch.func.grad(lambda x: first(x).sin().sum())}.get(transform, first)
    function = transform(mesh)
    found = spmd.jit(function, P("x"), P("x"), mesh=mesh)(x) if jitted else function(spmd.distribute(x, P("x"), mesh))
    torch.testing.assert_close(found.full_tensor(), wanted(x))


def test_vmap_outside(mesh):
    x = torch.randn(5, 8, 3)
    shifted = spmd.shard_map(Shifted.apply, mesh, P("x"), P("x"))
    found = torch.func.vmap(shifted)(spmd.distribute(x, P(None, "x"), mesh))
    torch.testing.assert_close(found.full_tensor(), torch.stack(list(map(expected, x))))


class Same(torch.autograd.Function):
    """Megatron's f, for per-rank code without types: the same forward, a sum backward."""

    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return psum(g, "x")


class Cast(Same):
    @staticmethod
    def forward(x):
        return pcast(x, "x")


class Unsummed(Cast):
    @staticmethod
    def backward(ctx, g):
        return g


class Summed(Same):
    """Megatron's g: a sum forward, the same backward."""

    @staticmethod
    def forward(x):
        return psum(x, "x")

    @staticmethod
    def backward(ctx, g):
        return g


def column_then_row(mesh, first):
    specs = (P(), P(None, "x"), P("x"))
    body = spmd.shard_map(lambda x, a, b: Summed.apply(first.apply(x) @ a @ b), mesh, specs, P())
    return spmd.jit(torch.func.grad(lambda *args: body(*args).square().sum(), (0, 1, 2)), specs, specs, mesh=mesh)


def test_functions_with_the_types_of_their_forward_pass(mesh):
    arguments = torch.randn(3, 5), torch.randn(5, 8), torch.randn(8, 2)
    wanted = torch.func.grad(lambda x, a, b: (x @ a @ b).square().sum(), (0, 1, 2))(*arguments)
    found = column_then_row(mesh, Cast)(*arguments)
    torch.testing.assert_close([x.full_tensor() for x in found], list(wanted))


@pytest.mark.parametrize(
    ("first", "error", "text"),
    [
        (Same, spmd.SpmdError, r"psum over 'x' in Same.backward of a gradient .* would become 4 times too large"),
        (Unsummed, spmd.TraceError, r"Gradient 0 that Unsummed.backward returns is varying along 'x'.* Call .*psum"),
    ],
    ids=["summed twice", "never summed"],
)
def test_functions_with_another_sum_than_their_types_say(mesh, first, error, text):
    with pytest.raises(error, match=text):
        column_then_row(mesh, first)(torch.randn(3, 5), torch.randn(5, 8), torch.randn(8, 2))
