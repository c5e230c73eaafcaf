"""Fused optimizers and list operators whose numbers are tensors, against torch's own kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import spmd
from spmd import P
from spmd.ir.list_operators import element_operator, list_decomposition
from spmd.tracing.trace import trace

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
SHAPES = ((5, 3), (7,), ())

aten = torch.ops.aten


def draw(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def positive(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.rand(shape).to(dtype) for shape in SHAPES]


ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
SGD = {
    "weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0,
    "nesterov": False, "maximize": False, "is_first_step": False,
}  # fmt: skip


def check(function: Callable[..., Any], *args: Any) -> None:
    """The function on shards gives what it gives on one device."""
    expected = function(*args)
    sharded = spmd.jit(function, P(), P(), mesh=MESH)
    for wanted, given in zip(expected, sharded(*args), strict=True):
        torch.testing.assert_close([x.full_tensor() for x in given], list(wanted))


@pytest.mark.parametrize("op", [aten._fused_adam.default, aten._fused_adamw.default], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.3}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0.1}, {"beta1": 0.3}],
    ids=str,
)
def test_adam(op: torch._ops.OpOverload, options: dict[str, Any]) -> None:
    steps = [torch.tensor(float(step)) for step in (1, 4, 9)]
    largest = positive() if options.get("amsgrad") else []
    check(functools.partial(op, **(ADAM | options)), draw(), draw(), draw(), positive(), largest, steps)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "is_first_step": True, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "dampening": 0.0},
        {"momentum": 0.9, "dampening": 0.2, "maximize": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_sgd(options: dict[str, Any]) -> None:
    buffers = draw() if "momentum" in options else []
    check(functools.partial(aten._fused_sgd.default, **(SGD | options)), draw(), draw(), buffers)


@pytest.mark.parametrize("infinite", [0.0, 1.0])
def test_scaled_gradients(infinite: float) -> None:
    def adam(scale: torch.Tensor, found_inf: torch.Tensor, *lists: Sequence[torch.Tensor]) -> Any:
        return aten._fused_adamw.default(*lists, **ADAM, grad_scale=scale, found_inf=found_inf)

    def sgd(scale: torch.Tensor, found_inf: torch.Tensor, *lists: Sequence[torch.Tensor]) -> Any:
        return aten._fused_sgd.default(*lists, **(SGD | {"momentum": 0.9}), grad_scale=scale, found_inf=found_inf)

    flags = torch.tensor(4.0), torch.tensor(infinite)
    single = functools.partial(draw, torch.float32)
    steps = [torch.tensor(3.0)] * 3
    check(adam, *flags, single(), single(), single(), positive(torch.float32), [], steps)
    check(sgd, *flags, single(), single(), single())


def test_rates_that_are_tensors() -> None:
    def adam(rate: torch.Tensor, *lists: Sequence[torch.Tensor]) -> Any:
        options = ADAM | {"lr": rate, "weight_decay": 0.1}
        return aten._fused_adamw.tensor_lr(*lists, **options)

    def sgd(rate: torch.Tensor, *lists: Sequence[torch.Tensor]) -> Any:
        return aten._fused_sgd.tensor_lr(*lists, **(SGD | {"lr": rate}))

    rate = torch.tensor(0.3, dtype=torch.float64)
    check(adam, rate, draw(), draw(), draw(), positive(), [], [torch.tensor(3.0)] * 3)
    check(sgd, rate, draw(), draw(), [])


def test_half_precision_is_rounded_once() -> None:
    half = functools.partial(draw, torch.bfloat16)
    steps = [torch.tensor(3.0)] * 3
    lists = (half(), half(), half(), positive(torch.bfloat16), [], steps)
    check(functools.partial(aten._fused_adam.default, **ADAM), *lists)


def test_fused_step_on_shards_needs_no_communication() -> None:
    lists = [draw(), draw(), draw(), positive(), [], [torch.tensor(3.0)] * 3]
    sharded = [P("data", "model"), P("data"), P()]
    in_specs = (sharded, sharded, sharded, sharded, [], P())
    step = spmd.jit(functools.partial(aten._fused_adamw.default, **ADAM), in_specs, in_specs[:5], mesh=MESH)
    assert () == step.plan(*lists).comms


def in_place(op: Any, a: list[torch.Tensor], *args: Any) -> tuple[list[torch.Tensor]]:
    written = [x.clone() for x in a]
    op(written, *args)
    return (written,)


SCALED = {
    "addcmul": lambda a, b, s: (torch._foreach_addcmul(a, b, b, s),),
    "addcdiv": lambda a, b, s: (torch._foreach_addcdiv(a, a, b, s),),
    "addcmul_": lambda a, b, s: in_place(torch._foreach_addcmul_, a, b, b, s),
    "addcdiv_": lambda a, b, s: in_place(torch._foreach_addcdiv_, a, a, b, s),
}


@pytest.mark.parametrize("name", SCALED)
def test_list_operators_with_numbers_in_a_tensor(name: str) -> None:
    check(SCALED[name], draw(), positive(), torch.randn(3))


@pytest.mark.parametrize(
    "function",
    [
        lambda a: (aten._foreach_powsum.Scalar(a, 3),),
        lambda a: (torch._foreach_norm(a, 3, dtype=torch.float64),),
        lambda a: (torch._foreach_max(a),),
        lambda a: (aten._foreach_zero.default(a),),
        lambda a: (torch._foreach_mm([a[0]], [a[0].mT]),),
        lambda a: (aten._foreach_copy.default(a, [x * 2 for x in a]),),
    ],
)
def test_list_operators_that_are_not_elementwise(function: Any) -> None:
    check(function, draw())


def test_every_list_operator_is_split() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::_foreach_")]
    found = [name.removeprefix("aten::").partition(".") for name in names if not name.endswith("out")]
    ops = [getattr(getattr(aten, base), overload or "default") for base, _, overload in found]
    functional = [op for op in ops if not op._schema.is_mutable]
    assert [] == sorted(str(op) for op in functional if element_operator(op) is None and list_decomposition(op) is None)
    assert len(functional) > 60


def test_traced_fused_step_is_one_operation_of_torch() -> None:
    graph = trace(functools.partial(aten._fused_sgd.default, **SGD), (draw(), draw(), [])).graph
    assert [aten._fused_sgd.default] == [operation.op for operation in graph.operations]
