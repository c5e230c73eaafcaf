"""The gradients of plain arguments of jitted functions are plain tensors, those of one device."""

from __future__ import annotations

import copy
from typing import Any

import plain_module_cases as cases
import pytest
import torch
from conftest import OnRanks
from sampling import product
from torch import nn
from torch.utils.checkpoint import checkpoint
from workers import Workers, call_on_mesh

import spmd
from spmd import DTensor, P

MESH = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
LOOPS = [
    cases.accumulated_and_clipped,
    cases.adapters,
    cases.tied,
    cases.the_module_is_the_function,
    cases.own_memory,
    cases.second_order,
]


@pytest.mark.parametrize(("name", "sharded"), product(cases.OPTIMIZERS, [False, True]))
def test_stock_optimizers_train_plain_modules(name: str, sharded: bool, on_ranks: OnRanks) -> None:
    on_ranks(cases.optimizers, {"x": 2}, name, sharded)


@pytest.mark.parametrize(("case", "axes"), product(LOOPS, [{"x": 3}, {"x": 2, "y": 2}, {"x": 2}]))
def test_loops_of_plain_modules_are_those_of_one_device(case: Any, axes: dict[str, int]) -> None:
    case(spmd.make_mesh(axes, runtime="virtual"))


@pytest.mark.parametrize("case", LOOPS, ids=lambda case: case.__name__)
def test_processes_train_plain_modules(case: Any, workers: Workers) -> None:
    workers.run(call_on_mesh, case, {"x": 2}, "distributed", ranks=2)


def test_uncompiled_functions_have_plain_gradients() -> None:
    with spmd.disable_jit():
        for case in (cases.accumulated_and_clipped, cases.own_memory, cases.second_order):
            case(MESH)


def test_ranks_with_other_plain_parameters_are_told(workers: Workers) -> None:
    for message in workers.run(call_on_mesh, cases.parameters_of_each_rank, {"x": 2}, "distributed", ranks=2):
        assert "argument 0.weight differs between ranks" in message


def test_dtensor_arguments_have_dtensor_gradients_beside_plain_ones() -> None:
    w = spmd.distribute(torch.ones(4, 4), P("x"), MESH).requires_grad_()
    b = torch.nn.Parameter(torch.ones(4))
    f = spmd.jit(lambda w, b: (w @ w + b).square().sum())
    f(w, b).backward()
    assert isinstance(w.grad, DTensor) and w.grad.spec.pspec == P("x") and type(b.grad) is torch.Tensor


def test_results_of_torch_func_stay_dtensors() -> None:
    w, x = torch.nn.Parameter(torch.ones(4)), torch.arange(4.0)
    f = spmd.jit(lambda w, x: (w * x).sin().sum(), mesh=MESH)
    inner = torch.func.grad(f, 1)(w, x)
    assert isinstance(inner, DTensor) and isinstance(torch.func.vjp(lambda x: f(w.detach(), x), x)[0], DTensor)
    inner.square().sum().backward()
    expected = torch.nn.Parameter(torch.ones(4))
    torch.func.grad(lambda w, x: (w * x).sin().sum(), 1)(expected, x).square().sum().backward()
    assert type(w.grad) is torch.Tensor
    torch.testing.assert_close(w.grad, expected.grad)


def test_batched_gradients_are_plain() -> None:
    w, x = torch.nn.Parameter(torch.randn(4, 3)), torch.randn(5, 4)
    plain = lambda w, x: torch.tanh(x @ w).sum(0)  # noqa: E731
    f = spmd.jit(plain, (P("y"), P("x")), mesh=MESH)
    (found,) = torch.func.vmap(lambda v: torch.autograd.grad(f(w, x), w, v))(torch.eye(3))
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(lambda w: plain(w, x), w))


def test_a_plain_gradient_is_planned_in_the_backward_program() -> None:
    x, mesh = torch.ones(65536, 8), spmd.make_mesh({"x": 2}, runtime="virtual")
    loss = lambda w, x: (x @ w).square().sum()  # noqa: E731
    f = spmd.jit(loss, (P("x"), P("x")), mesh=mesh)
    plain = torch.nn.Parameter(torch.ones(8, 6))
    sharded = spmd.distribute(plain, P("x"), mesh).requires_grad_()
    for w, kind in ((plain, "all_reduce"), (sharded, "reduce_scatter")):
        value = f(w, x)
        with spmd.comms_of() as sent:
            value.backward()
        assert [(comm.kind, comm.axes) for comm in sent.comms] == [(kind, ("x",))]
        assert "the result requires P()" in sent.comms[0].cause or kind == "reduce_scatter"
    small = spmd.jit(loss, (P("x"), P("x")), mesh=mesh, comms={"all_reduce": "100B", "all_gather": "1MB"})
    with pytest.raises(spmd.PlanError, match=r"the result requires P.*backward"):
        small(plain, x)


def test_float_arguments_and_buffers_beside_plain_parameters() -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.0), nn.Linear(6, 1))
    module = copy.deepcopy(alone)
    f = spmd.jit(lambda model, x, scale: (model(x) * scale).square().mean(), (None, P("x"), None), mesh=MESH)
    for step in range(3):
        x = torch.randn(6, 4)
        f(module, x, 0.5 * step + 1).backward()
        (alone(x) * (0.5 * step + 1)).square().mean().backward()
        for one, other in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(dict(module.named_buffers()), dict(alone.named_buffers()))


def _losses(model: nn.Module, alpha: torch.Tensor, scale: torch.Tensor, f: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Losses in which plain tensors stand beside the result of a function."""
    decay = 0.1 * sum(p.square().sum() for p in model.parameters())
    with spmd.implicit_replication():
        scaled = f(model, x) * scale
    return [
        f(model, x).square().sum() + decay,
        decay + alpha.exp() * f(model, x).square().sum(),
        (f(model, x) * alpha + alpha).square().mean(),
        scaled.square().sum() + scale[:1].sum() * alpha,
        checkpoint(lambda x: f(model, x), x, use_reentrant=False).square().sum(),
    ]


@pytest.mark.parametrize("number", range(5))
def test_plain_tensors_beside_results_have_plain_gradients(number: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    alpha, scale = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.arange(3.0))
    leaves = [*model.parameters(), alpha, scale]
    found = []
    for f in (spmd.jit(lambda model, x: model(x), (None, P("x")), mesh=MESH), lambda model, x: model(x)):
        for _ in range(2):
            _losses(model, alpha, scale, f, x)[number].backward()
        assert all(leaf.grad is None or type(leaf.grad) is torch.Tensor for leaf in leaves)
        found.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    torch.testing.assert_close(*found)
    assert len(alpha._backward_hooks or ()) <= 1


def test_parameters_that_are_not_used_have_no_gradient() -> None:
    torch.manual_seed(0)
    alone = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
    module, x = copy.deepcopy(alone), torch.randn(5, 4)
    both = lambda model, x: (model["a"](x).square().sum(), model["b"](x).sum())  # noqa: E731
    for side, f in ((module, spmd.jit(both, (None, P("x")), mesh=MESH)), (alone, both)):
        optimizer = torch.optim.AdamW(side.parameters(), lr=0.1, weight_decay=0.5)
        f(side, x)[0].backward()
        assert side["b"].weight.grad is None
        optimizer.step()
    torch.testing.assert_close(module.state_dict(), alone.state_dict())


def test_gradgradcheck() -> None:
    f = spmd.jit(lambda a, b: torch.tanh(a @ b), (P("x"), P(None, "y")), mesh=MESH)
    a, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (2, 3)))
    assert torch.autograd.gradgradcheck(lambda a, b: f(a, b).full_tensor(), (a, b))


def test_dropout_of_strided_operands_draws_what_it_does_without_a_gradient() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.25, batch_first=True)
    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    x, found = torch.randn(4, 6, 16), []
    for function in (layer, spmd.jit(lambda layer, x: layer(x), mesh=mesh)):
        layer.zero_grad()
        torch.manual_seed(1)
        result = function(x) if function is layer else function(layer, x).full_tensor()
        result.square().mean().backward()
        found.append([result.detach(), *(parameter.grad for parameter in layer.parameters())])
    torch.testing.assert_close(found[0], found[1])
