"""Gradients under vmap in shard_map bodies: one device and loops are the truth, or an error names the cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from manual_cases import GRID, PAIR, assert_same, randn
from torch import Tensor
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import spmd
from spmd import P
from spmd.collectives import pcast, psum
from spmd.core.pytree import tree_map

HOW = ("program", "in jit", "uncompiled")
WEIGHTS, SAMPLES = randn(3), randn(8, 3)
MODELS, TOKENS = randn(2, 3), torch.tensor([0, 2, 1, 1, 2, 0, 1, 2])


def loss(w: Tensor, s: Tensor) -> Tensor:
    return torch.tanh(w @ s) * w.square().sum()


def run(how: str, body: Callable[..., Any], specs: Any, out: Any, *args: Any, mesh: spmd.Mesh = PAIR) -> Any:
    mapped = spmd.shard_map(body, mesh, specs, out)
    if how == "in jit":
        return spmd.jit(mapped, mesh=mesh)(*args)
    if how == "program":
        return mapped(*args)
    with spmd.disable_jit():
        return mapped(*args)


def maml(w: Tensor, xs: Tensor) -> Tensor:
    adapted = lambda w, s: loss(w - 0.1 * grad(loss)(w, s), s)  # noqa: E731
    return vmap(grad(adapted), (None, 0))(w, xs)


def low_rank(w: Tensor, xs: Tensor) -> dict[str, Tensor]:
    params = {"base": w, "adapter": xs * 0.5}
    merged = lambda params, s: loss(params["base"] + params["adapter"], s)  # noqa: E731
    return vmap(grad(merged), ({"base": None, "adapter": 0}, 0))(params, xs)  # type: ignore[no-any-return]


PER_SAMPLE: dict[str, Callable[..., Any]] = {
    "grad": lambda w, xs: vmap(lambda s: grad(loss)(w, s))(xs),
    "in_dims": lambda w, xs: vmap(grad(loss), (None, 0))(w, xs),
    "grad_and_value": lambda w, xs: vmap(grad_and_value(loss), (None, 0))(w, xs),
    "vjp": lambda w, xs: vmap(lambda s: vjp(lambda w: loss(w, s), w)[1](torch.ones((), dtype=w.dtype))[0])(xs),
    "jacrev": lambda w, xs: vmap(lambda s: jacrev(lambda w: torch.sin(w * s))(w))(xs),
    "jacrev of grad": lambda w, xs: vmap(lambda s: jacrev(grad(loss))(w, s))(xs),
    "grad of grad": lambda w, xs: vmap(lambda s: grad(lambda w: grad(loss)(w, s).square().sum())(w))(xs),
    "chunks": lambda w, xs: vmap(grad(loss), (None, 0), chunk_size=3)(w, xs),
    "nested": lambda w, xs: vmap(vmap(grad(loss), (None, 0)), (None, 0))(w, torch.stack([xs, 2 * xs], 1)),
    "a batch for each model": lambda w, xs: vmap(
        lambda s: vmap(lambda m: grad(loss)(m, s))(torch.stack([w, 2 * w])))(xs),
    "derived": lambda w, xs: vmap(lambda s: grad(loss)(2 * w, s))(xs),
    "tokens": lambda w, xs: vmap(lambda n: grad(lambda w: w.sin()[n])(w))((xs[:, 0] * 100).long().abs() % 3),
    "mixed with a local operand": lambda w, xs: vmap(lambda s: grad(lambda w: loss(w * xs[0], s))(w))(xs),
    "inner loop": maml,
    "adapters": low_rank,
}  # fmt: skip


def one_device(name: str) -> Any:
    """Each rank's samples for themselves, where a function reads one sample of its own."""
    return PER_SAMPLE[name](WEIGHTS, SAMPLES) if name != "mixed with a local operand" else torch.cat(
        [PER_SAMPLE[name](WEIGHTS, part) for part in SAMPLES.chunk(2)])  # fmt: skip


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", PER_SAMPLE)
def test_gradients_of_samples_are_not_added(name: str, how: str) -> None:
    body, expected = PER_SAMPLE[name], one_device(name)
    outs = tree_map(lambda _: P("x"), expected)
    line = r"test_batches_in_bodies.py:\d+ .*would be a sum over 'x' .*spmd\.collectives\.pcast"
    with pytest.raises(spmd.TraceError, match=line):
        run(how, body, (P(), P("x")), outs, WEIGHTS, SAMPLES)
    varying = lambda w, xs: body(pcast(w, "x", to="varying"), xs)  # noqa: E731
    assert_same(run(how, varying, (P(), P("x")), outs, WEIGHTS, SAMPLES), expected)


def test_a_loop_over_samples_says_the_same() -> None:
    def looped(w: Tensor, xs: Tensor) -> Tensor:
        w = pcast(w, "x", to="varying")
        return torch.stack([grad(loss)(w, s) for s in xs])

    assert_same(run("program", looped, (P(), P("x")), P("x"), WEIGHTS, SAMPLES[:7]), one_device("grad")[:7])
    batched = lambda w, xs: PER_SAMPLE["grad"](pcast(w, "x", to="varying"), xs)  # noqa: E731
    for count in (7, 3):  # torch's vmap fails for an empty batch of products
        found = run("program", batched, (P(), P("x")), P("x"), WEIGHTS, SAMPLES[:count])
        assert_same(found, one_device("grad")[:count])


SUMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Any]] = {
    "gradient of a batch": (
        lambda w, xs: grad(lambda w: vmap(loss, (None, 0))(w, xs).sum())(w),
        lambda w, xs: grad(lambda w: vmap(loss, (None, 0))(w, xs).sum())(w), P()),
    "ensemble": (
        lambda w, xs: vmap(grad(lambda w, xs: (xs @ w).sin().sum()), (0, None))(torch.stack([w, 2 * w]), xs),
        lambda w, xs: vmap(grad(lambda w, xs: (xs @ w).sin().sum()), (0, None))(torch.stack([w, 2 * w]), xs), P()),
    "ensemble with batches": (
        lambda w, xs: vmap(grad(loss))(w.expand(4, 3), xs),
        lambda w, xs: vmap(grad(loss), (None, 0))(w, xs).view(2, 4, 3).sum(0), P()),
    "a loss of all ranks": (
        lambda w, xs: vmap(lambda s: grad(lambda w: psum(loss(w, s), "x"))(w))(xs),
        lambda w, xs: vmap(grad(loss), (None, 0))(w, xs).view(2, 4, 3).sum(0), P()),
    "hyperparameters": (
        lambda w, xs: vmap(lambda k: grad(lambda w: (k * xs @ w).sin().sum())(w))(torch.arange(3.0).double()),
        lambda w, xs: vmap(lambda k: grad(lambda w: (k * xs @ w).sin().sum())(w))(torch.arange(3.0).double()), P()),
    "weights as a batch": (
        lambda w, xs: vmap(lambda k: grad(lambda w: (k * xs @ w).sin().sum())(w))(w),
        lambda w, xs: vmap(lambda k: grad(lambda w: (k * xs @ w).sin().sum())(w))(w), P()),
    "hessian": (
        lambda w, xs: hessian(lambda w: (xs @ w).sin().sum())(w),
        lambda w, xs: hessian(lambda w: (xs @ w).sin().sum())(w), P()),
    "hessian by products": (
        lambda w, xs: vmap(lambda v: jvp(grad(lambda w: (xs @ w).sin().sum()), (w,), (v,))[1])(torch.eye(3).double()),
        lambda w, xs: hessian(lambda w: (xs @ w).sin().sum())(w), P()),
    "jacobian of a sum": (
        lambda w, xs: jacrev(lambda w: psum((xs * w).sin().sum(0), "x"))(w),
        lambda w, xs: jacrev(lambda w: (xs * w).sin().sum(0))(w), P()),
    "a batch of cotangents": (
        lambda w, xs: vmap(vjp(lambda w: (xs @ w).sin(), w)[1])(torch.stack([xs[:, 0], xs[:, 1]]))[0],
        lambda w, xs: vmap(vjp(lambda w: (xs @ w).sin(), w)[1])(torch.stack([xs[:, 0], xs[:, 1]]))[0], P()),
    "forward mode": (
        lambda w, xs: vmap(jacfwd(loss), (None, 0))(w, xs),
        lambda w, xs: vmap(grad(loss), (None, 0))(w, xs), P("x")),
    "of samples": (
        lambda w, xs: vmap(grad(loss, 1), (None, 0))(w, xs),
        lambda w, xs: vmap(grad(loss, 1), (None, 0))(w, xs), P("x")),
    "only of adapters": (
        lambda w, xs: vmap(grad(lambda a, s: loss(w + a, s)))(xs, xs),
        lambda w, xs: vmap(grad(lambda a, s: loss(w + a, s)))(xs, xs), P("x")),
    "independent of the batch": (
        lambda w, xs: vmap(lambda s: grad(lambda w: w.square().sum())(w) * s)(xs),
        lambda w, xs: 2 * w * xs, P("x")),
    "summands": (
        lambda w, xs: vmap(grad(loss), (None, 0))(pcast(w, "x", to="reduced"), xs).sum(0),
        lambda w, xs: vmap(grad(loss), (None, 0))(w, xs).sum(0), P(partial={"x": "sum"})),
    "clipped per sample": (
        lambda w, xs: psum(_clipped(vmap(grad(loss), (None, 0))(pcast(w, "x"), xs)).sum(0), "x"),
        lambda w, xs: _clipped(vmap(grad(loss), (None, 0))(w, xs)).sum(0), P()),
}  # fmt: skip


def _clipped(gradients: Tensor) -> Tensor:
    return gradients * (0.1 / gradients.norm(dim=1, keepdim=True)).clamp(max=1)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", SUMS)
def test_sums_that_are_meant_stay(name: str, how: str) -> None:
    body, expected, out = SUMS[name]
    assert_same(run(how, body, (P(), P("x")), out, WEIGHTS, SAMPLES), expected(WEIGHTS, SAMPLES))


def test_a_batch_outside_of_the_body_is_one_of_all_ranks() -> None:
    """Its elements are the same on all ranks, each of which holds a part of every one."""
    mapped = spmd.shard_map(lambda w, s: grad(lambda w: (w * s).sin().sum())(w), PAIR, (P(), P("x")), P())
    whole = vmap(lambda s: grad(lambda w: (w * s).sin().sum())(WEIGHTS[0]))(SAMPLES[:, :2])
    assert_same(vmap(lambda s: mapped(WEIGHTS[0], s))(SAMPLES[:, :2]), whole)


@pytest.mark.parametrize("how", HOW)
def test_each_axis_counts_for_itself(how: str) -> None:
    """The batch is along "x" another one on each rank, along "y" the ranks hold parts of each sample."""
    specs, per_sample = (P("y"), P("x", "y")), lambda w, xs: vmap(lambda s: grad(_part)(w, s))(xs)
    expected = vmap(lambda s: grad(lambda w: (w * s).sin().sum())(WEIGHTS[:2]))(SAMPLES[:, :2])
    with pytest.raises(spmd.TraceError, match=r"would be a sum over 'x' .*pcast\(x, 'x'"):
        run(how, per_sample, specs, P("x", "y"), WEIGHTS[:2], SAMPLES[:, :2], mesh=GRID)
    varying = lambda w, xs: per_sample(pcast(w, "x"), xs)  # noqa: E731
    assert_same(run(how, varying, specs, P("x", "y"), WEIGHTS[:2], SAMPLES[:, :2], mesh=GRID), expected)
    only_y = lambda k, xs: vmap(lambda s: grad(lambda k: psum((k * s).sin().sum(), "y"))(k))(xs)  # noqa: E731
    with pytest.raises(spmd.TraceError, match=r"would be a sum over 'x' "):
        run(how, only_y, (P(), P("x", "y")), P("x"), WEIGHTS[0], SAMPLES[:, :2], mesh=GRID)
    both = lambda k, xs: only_y(pcast(k, "x"), xs)  # noqa: E731
    found = run(how, both, (P(), P("x", "y")), P("x"), WEIGHTS[0], SAMPLES[:, :2], mesh=GRID)
    assert_same(found, vmap(lambda s: grad(lambda k: (k * s).sin().sum())(WEIGHTS[0]))(SAMPLES[:, :2]))


def _part(w: Tensor, s: Tensor) -> Tensor:
    return (w * s).sin().sum()
