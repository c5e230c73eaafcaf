"""`torch.distributions` inside: what torch checks of values is checked when the program runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
from torch.distributions import constraints
from torch.utils.checkpoint import checkpoint
from workers import Workers, call_on_mesh

import spmd
from proofs.distributions.cases import Case, cases
from proofs.distributions.check import questions
from spmd import P

CASES = cases()
FAST = {"gradient of log_prob", "bad parameters", "bad value"}
PAIR = spmd.make_mesh({"x": 2}, runtime="virtual")


@pytest.fixture(autouse=True)
def _validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate by default, which a call of torch.compile in any test turns off for the process."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_densities_and_errors_are_those_of_one_device(case: Case) -> None:
    assert [] == [text for q in questions(case) if q.name in FAST and (text := q.difference(3)) is not None]


@pytest.mark.parametrize("name", ["Dirichlet", "StudentT of low degrees"])
def test_everything_is_that_of_one_device(name: str) -> None:
    """These two index by masks; `python -m proofs.distributions` has all."""
    (case,) = [case for case in CASES if case.name == name]
    assert [] == [text for q in questions(case) if (text := q.difference(2)) is not None]


def density(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return D.Normal(0.0, scale).log_prob(x)


def test_checks_send_nothing_and_show_the_values_of_the_rank() -> None:
    step = spmd.jit(density, P("x"), P("x"), mesh=PAIR, comms="error")
    x, scale = torch.zeros(5), torch.tensor([1.0, 2.0, 3.0, 4.0, -5.0])
    with pytest.raises(
        ValueError, match=r"Expected parameter scale \(Tensor of shape \(5,\)\) of distribution Normal"
    ) as error:
        step(x, scale)
    assert "GreaterThan(lower_bound=0.0), but found invalid values:\ntensor([ 4., -5.])" in str(error.value)
    assert torch.equal(density(x, scale.abs()), step(x, scale.abs()).full_tensor())
    with pytest.raises(ValueError, match=r"(?s)within the support .* of the distribution Exponential.*\[ 1., -1.\]"):
        spmd.jit(lambda x: D.Exponential(1.0).log_prob(x), P("x"), mesh=PAIR)(torch.tensor([2.0, 2.0, 1.0, -1.0]))


def test_what_is_known_is_checked_in_the_trace() -> None:
    scale = torch.tensor([-1.0])
    with pytest.raises(ValueError, match="Expected parameter scale"):
        spmd.jit(lambda x: density(x, scale), P("x"), mesh=PAIR).lower(torch.zeros(4))
    program = spmd.jit(lambda x: density(x, -scale) + D.Uniform(0.0, 9.0).log_prob(x), P("x"), mesh=PAIR)
    assert program.lower(torch.zeros(4)).as_text().count("check(") == 2  # of the two values


@pytest.mark.parametrize("validate", [False, True])
def test_without_validation_nothing_is_checked(validate: bool) -> None:
    step = spmd.jit(lambda x, s: D.Normal(x, s, validate_args=validate).log_prob(x), P("x"), mesh=PAIR)
    assert validate == ("check(" in step.lower(torch.ones(4), torch.ones(4)).as_text())


def test_a_changed_default_of_validation_is_another_program() -> None:
    normal = D.Normal(torch.zeros(()), torch.ones(()))
    functions = (density, lambda x, s: D.Normal(x, s).log_prob(x), lambda x, s: normal.log_prob(x * torch.nan))
    for function in functions:
        step = spmd.jit(function, P("x"), P("x"), mesh=PAIR)
        x = torch.ones(4)
        for _ in range(2):
            with pytest.raises(ValueError, match="Expected"):
                step(x, -x)
            D.Distribution.set_default_validate_args(False)
            try:
                assert step(x, -x).shape == (4,)
            finally:
                D.Distribution.set_default_validate_args(True)


def test_parameters_that_are_dynamic_floats() -> None:
    def function(x: torch.Tensor, loc: float, scale: float) -> torch.Tensor:
        return D.Normal(loc, scale).log_prob(x) + D.Uniform(-9.0, scale + 9.0).entropy()

    step = spmd.jit(function, {"x": P("x")}, mesh=PAIR)
    x = torch.randn(5)
    for scale in (1.0, 2.0, 3.0):
        torch.testing.assert_close(step(x, 0.5, scale).full_tensor(), function(x, 0.5, scale))
    assert step.cache_info().misses == 1
    with pytest.raises(ValueError, match="Expected parameter scale"):
        step(x, 0.5, -1.0)


def batched(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(density)(x, scale)


def batched_gradient(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(torch.func.grad(lambda x, s: density(x, s).sum()))(x, scale)


def second_derivative(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda s: torch.func.grad(lambda x: density(x, s).sum())(x).sum())(scale)


def tangent(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(lambda s: density(x, s), (scale,), (scale,))[1]  # type: ignore[no-any-return]


def checkpointed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling():  # torch has no checkpoints under torch.func
        return torch.func.grad(lambda s: density(x, s).sum())(scale)
    return torch.func.grad(lambda s: checkpoint(density, x, s, use_reentrant=False).sum())(scale)


def mapped(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return spmd.shard_map(density, PAIR, P("x"), P("x"))(x, scale)  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [batched, batched_gradient, second_derivative, tangent, checkpointed, mapped])
def test_under_transforms(function: Callable[..., Any]) -> None:
    x, scale = torch.randn(5, 3), torch.rand(5, 3) + 0.5
    step = spmd.jit(function, P("x"), P("x"), mesh=PAIR)
    program = step.lower(x, scale).as_text()
    assert 1 <= program.count("check(") <= 3
    D.Distribution.set_default_validate_args(False)  # vmap of one device cannot read values
    try:
        expected = function(x, scale)
    finally:
        D.Distribution.set_default_validate_args(True)
    expected = expected.full_tensor() if isinstance(expected, spmd.DTensor) else expected
    torch.testing.assert_close(step(x, scale).full_tensor(), expected)
    with pytest.raises(ValueError, match="Expected parameter scale"):
        step(x, -scale)


def test_from_outside() -> None:
    step = spmd.jit(density, P("x"), P("x"), mesh=PAIR)
    x, scale = torch.randn(5), torch.rand(5) + 0.5
    loss = lambda f: lambda s: f(x, s).sum()  # noqa: E731
    expected = torch.func.grad(loss(density))(scale)
    torch.testing.assert_close(torch.func.grad(loss(step))(scale).full_tensor(), expected)
    leaf = spmd.distribute(scale, P("x"), PAIR).requires_grad_()
    loss(step)(leaf).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.full_tensor(), expected)


def test_matrices_are_checked_in_both_parts() -> None:
    matrix = torch.eye(3).expand(4, 3, 3).clone()
    skew = matrix.clone()
    skew[-1, 0, 1] = 0.5
    negative = matrix.clone()
    negative[0] *= -1
    step = spmd.jit(lambda m: D.MultivariateNormal(torch.zeros(3), m).loc + 0, P("x"), mesh=PAIR)
    check = spmd.jit(lambda m: constraints.positive_definite.check(m), P("x"), P("x"), mesh=PAIR)
    step(matrix)
    for wrong in (skew, negative):
        assert torch.equal(constraints.positive_definite.check(wrong), check(wrong).full_tensor())
        with pytest.raises(ValueError, match="PositiveDefinite"):
            step(wrong)


def transformed(loc: torch.Tensor) -> D.Distribution:
    return D.TransformedDistribution(D.Normal(torch.zeros(4), torch.ones(4)), D.AffineTransform(loc, 1.0))


def test_divergences_of_transforms_that_differ_are_errors() -> None:
    step = spmd.jit(lambda a, b: D.kl_divergence(transformed(a), transformed(b)), P("x"), mesh=PAIR)
    assert torch.equal(torch.zeros(4), step(torch.ones(4), torch.ones(4)).full_tensor())
    with pytest.raises(NotImplementedError, match=r"transforms.py:\d+ \(`if not \(self.loc == other.loc\)"):
        step(torch.ones(4), torch.arange(4.0))


def test_samplers_that_draw_again_are_refused() -> None:
    with pytest.raises(spmd.TraceError, match=r"von_mises draws again .* at test_distributions.py"):
        spmd.jit(lambda x: D.VonMises(x, x).sample(), P("x"), mesh=PAIR)(torch.ones(4))


def test_other_reads_of_values_are_errors_as_before() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return D.Normal(x, 1.0).mean if (x > 0).all() else x

    with pytest.raises(spmd.TraceError, match="needs the values of tensor"):
        spmd.jit(function, P("x"), mesh=PAIR)(torch.ones(4))


def test_another_thread_makes_distributions_meanwhile() -> None:
    errors: list[BaseException] = []

    def refused() -> None:
        try:
            D.Normal(0.0, torch.tensor(-1.0))
        except ValueError as error:
            errors.append(error)

    def function(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=refused)
        thread.start()
        thread.join()
        return density(x, x)

    spmd.jit(function, P("x"), mesh=PAIR)(torch.ones(4))
    assert errors
    assert "Expected parameter scale" in str(errors[0])


def test_uncompiled() -> None:
    with spmd.disable_jit(), pytest.raises(ValueError, match="Expected parameter scale"):
        spmd.jit(density, P("x"), mesh=PAIR)(torch.ones(4), -torch.ones(4))


def refused(mesh: spmd.Mesh) -> str:
    with pytest.raises(ValueError, match="Expected parameter scale") as error:
        spmd.jit(density, P("x"), P("x"), mesh=mesh)(torch.zeros(5), -torch.arange(1.0, 6.0))
    return str(error.value).partition("values:\n")[2].splitlines()[0]


def test_on_processes_each_rank_shows_its_values(workers: Workers) -> None:
    found = workers.run(call_on_mesh, refused, {"x": 2}, "distributed", ranks=2)
    assert ["tensor([-1., -2., -3.])", "tensor([-4., -5.])"] == found
