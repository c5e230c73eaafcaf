"""Predicted memory against closed forms, and against what a rank's program really holds."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt
import layouts
import spmd
from spmd import P, TensorMeta
from spmd.plan.memory import Kind
from spmd.testing.live import peak_bytes
from spmd.tree import tree_map
from training import Training, init

MESH = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.float32)


def gpt_metas(training: Training) -> tuple[Any, Any]:
    """The arguments of a training step, without data."""
    state = tree_map(lambda t: TensorMeta(t.shape, t.dtype), init(training.config, training.optimizer))
    tokens = TensorMeta((16, training.config.context), torch.int64)
    return state, (tokens, tokens)


@pytest.mark.parametrize("name", layouts.STRATEGIES)
def test_a_gpt_step_holds_what_is_predicted(name: str) -> None:
    strategy = layouts.STRATEGIES[name]
    mesh = spmd.make_mesh(strategy.mesh, runtime="virtual")
    training = Training(gpt.Config(layers=2, width=32, vocab=64, context=16), strategy, mesh)
    step = training.step()
    metas = gpt_metas(training)
    assert peak_bytes(step.lower(*metas)) == step.plan(*metas).memory.peak


def transposes(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).t().reshape(-1)  # a copy
    return y.view(4, -1).relu() + x.reshape(4, -1).t().contiguous().view(4, -1).sum()


def attends(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w).view(8, 4, 2, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2).softmax(-1)


def splits(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).split([3, w.shape[1] - 3], -1)
    return torch.cat([b.exp(), a[..., None].expand(*a.shape, 2).flatten(-2)], -1).cumsum(0)


def normalizes(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x @ w, (w.shape[1],)).logsumexp(-1) + F.dropout(x, 0.5).amax(-1)


def gradient(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.grad(lambda w: F.gelu(x @ w).square().mean())(w)


PROGRAMS = [
    (transposes, (8, 12), (12, 16)),
    (attends, (8, 4, 12), (12, 16)),
    (splits, (8, 12), (12, 16)),
    (normalizes, (8, 12), (12, 16)),
    (gradient, (8, 12), (12, 16)),
]


@pytest.mark.parametrize("specs", [(P("x"), P()), (P("x"), P("x", "y")), (P(None, "x"), P("x")), (P("y"), P())])
@pytest.mark.parametrize(("function", "x", "w"), PROGRAMS, ids=[function.__name__ for function, *_ in PROGRAMS])
def test_small_programs_hold_what_is_predicted(
    function: Any, x: tuple[int, ...], w: tuple[int, ...], specs: tuple[P, P]
) -> None:
    step = spmd.jit(function, specs, P("x"), mesh=MESH)
    assert peak_bytes(step.lower(meta(*x), meta(*w))) == step.plan(meta(*x), meta(*w)).memory.peak


def test_the_peak_in_closed_form() -> None:
    """At the second product: both arguments, the first product, and the result."""
    step = spmd.jit(lambda x, w: torch.relu(x @ w) @ w, (P("x"), P()), P("x"), mesh=MESH)
    memory = step.plan(meta(64, 32), meta(32, 32)).memory
    x, w = 32 * 32 * 4, 32 * 32 * 4
    assert memory.peak == x + w + 2 * x
    assert memory.by_kind == {Kind.INPUT: x + w, Kind.CONSTANT: 0, Kind.OUTPUT: 0, Kind.TEMPORARY: 2 * x}
    assert memory.timeline == (x + w + x, x + w + 2 * x, x + w + 2 * x)
    assert memory.operation is not None and memory.operation.name == "relu"
    assert "relu at test_memory.py:" in str(memory)


def test_views_take_no_memory() -> None:
    step = spmd.jit(lambda x: x.t().reshape(-1)[1:], P(), P(), mesh=MESH)
    assert step.plan(meta(8, 64)).memory.peak == 2 * 8 * 64 * 4  # the reshape of a transpose copies, its slice does not
    step = spmd.jit(lambda x: x.view(4, -1)[1:].t(), P(), P(), mesh=MESH)
    assert step.plan(meta(8, 64)).memory.peak == 8 * 64 * 4


def test_a_program_without_operations_holds_its_arguments() -> None:
    step = spmd.jit(lambda x: x, P("x"), P("x"), mesh=MESH)
    memory = step.plan(meta(8)).memory
    assert (memory.peak, memory.timeline, memory.operation) == (16, (16,), None)
    assert "the end" in str(memory)


def test_constants_are_told_apart() -> None:
    table = torch.arange(6.0)
    memory = spmd.jit(lambda x: x + table, P(), P(), mesh=MESH).plan(meta(6)).memory
    assert memory.by_kind == {Kind.INPUT: 24, Kind.CONSTANT: 24, Kind.OUTPUT: 24, Kind.TEMPORARY: 0}
