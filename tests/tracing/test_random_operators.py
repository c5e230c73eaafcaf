"""Random numbers are those of one device after the same seed, on every mesh."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import P
from spmd.lowering.verify import verify

X, W = torch.randn(7, 6), torch.randn(6, 5)


def dropout_and_gradient(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    loss, gradient = torch.func.grad_and_value(lambda w: F.dropout((x @ w).sin(), 0.4).square().sum())(w)[::-1]
    return [loss, gradient, torch.rand(3)]


def factories(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    unused = torch.rand(11)  # moves the generator on, as on one device
    order = torch.randperm(9) + torch.randint(0, 5, (9,))
    drawn = [torch.randn(5, 7), torch.empty(4, 5).uniform_(-1, 1), torch.randn_like(x), torch.normal(x, 2.0), order]
    return drawn if unused is not None else []


def from_values(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    h = torch.softmax(x @ w, -1)
    return [torch.bernoulli(h), torch.multinomial(h, 3), torch.poisson(h * 5), torch.rand(2)]


def over_memory(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """Strides order the numbers: dropout after a transpose, as attention has it."""
    y = (x @ w).t()
    return [F.dropout(y), F.dropout(y, 0.2), torch.randn_like(y), torch.empty_like(y).exponential_(), torch.rand(2)]


def twice(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    return [torch.rand(4), torch.rand(4)]


def certain(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """Probabilities of zero and one: torch draws all the same, but for dropout that it leaves out."""
    q = (x @ w).expand(1, 1, -1, -1)
    drawn = [torch.bernoulli(x, 0.0), torch.bernoulli(x, 1.0), torch.empty_like(x).bernoulli_(0.0)]
    dropped = [torch.native_dropout(x, p, True)[0] for p in (0.0, 1.0)] + [F.dropout(x, 0.0), F.dropout(x, 1.0)]
    return [*drawn, *dropped, F.scaled_dot_product_attention(q, q, q, dropout_p=0.0), torch.rand(2)]


FUNCTIONS = (dropout_and_gradient, factories, from_values, over_memory, twice, certain)


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 3}, {"data": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_are_those_of_one_device(function, axes) -> None:
    torch.manual_seed(7)
    expected, after = function(X, W), torch.rand(2)
    specs = (P("data"), P(None, "model") if "model" in axes else P())
    jitted = spmd.jit(function, specs, P(), mesh=spmd.make_mesh(axes, runtime="virtual"))
    verify(jitted.lower(X, W))
    for _ in range(2):  # traced, and from the cache
        torch.manual_seed(7)
        results = jitted(X, W)
        assert torch.equal(after, torch.rand(2)), "the generator is elsewhere than after the same on one device"
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result.full_tensor(), value)
    assert not torch.equal(jitted(X, W)[-1].full_tensor(), expected[-1]), "a second call draws other numbers"


def test_dropout_of_a_shard_moves_no_bytes() -> None:
    mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
    plan = spmd.jit(lambda x: F.dropout(x, 0.5), P("data"), P("data"), mesh=mesh).plan(torch.randn(8, 3))
    assert ((), ()) == (plan.comms, plan.fallbacks)


def test_a_generator_of_its_own_is_refused() -> None:
    generator = torch.Generator()
    function = spmd.jit(lambda x: x + torch.rand(4, generator=generator), P(), P(), mesh=spmd.make_mesh({"data": 2}))
    with pytest.raises(spmd.TraceError, match=r"_operators.py:\d+ .*torch.Generator of its own.*torch.manual_seed"):
        function(torch.ones(4))
