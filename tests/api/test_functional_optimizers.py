"""Training steps of a stock module by functional optimizers of torch and TorchOpt, sharded, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling import sample
from stock_models import STRATEGIES, encoder
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd
from torch.utils._pytree import tree_leaves, tree_map

import spmd
from spmd import P
from spmd.ir.list_operators import FUSED

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")

Update = Callable[[dict[str, Tensor], Any, dict[str, Tensor]], tuple[dict[str, Tensor], Any]]
"""New parameters and a new state from parameters, state and gradients."""


def with_torch(optimizer: Callable[..., None], states: int, **options: Any) -> tuple[Any, Update]:
    """The initial state of a functional optimizer of torch, and its update as a function that writes to no argument.

    The state is a list for each of `states` moments, and the number of steps of each parameter.
    """

    def init(params: dict[str, Tensor]) -> Any:
        return [[torch.zeros_like(x) for x in params.values()] for _ in range(states)], [
            torch.zeros(()) for _ in params
        ]

    def update(params: dict[str, Tensor], state: Any, grads: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        params, (moments, steps) = tree_map(torch.clone, (params, state))
        lists = [list(params.values()), list(grads.values()), *moments]
        if states == 2:
            lists += [[], steps]
        optimizer(*lists, **options)
        return params, (moments, steps)

    return init, update


RATE, BETAS = 2.0**-6, (0.75, 0.9375)
"""Exact in float32, in which torch and TorchOpt count steps and torch computes the corrections of moments from them."""

ADAM = {
    "amsgrad": False,
    "beta1": BETAS[0],
    "beta2": BETAS[1],
    "lr": RATE,
    "weight_decay": 0.01,
    "eps": 1e-4,
    "maximize": False,
}
SGD = {"weight_decay": 0.01, "momentum": 0.9, "lr": RATE, "dampening": 0.0, "nesterov": False, "maximize": False}
TORCH: dict[str, tuple[Any, Update]] = {
    **{
        f"{name}, {way}": with_torch(function, 2, **{way: True}, **ADAM)
        for name, function in (("adam", adam), ("adamw", adamw))
        for way in ("foreach", "fused")
    },
    "sgd": with_torch(sgd, 1, foreach=False, **SGD),
    "sgd, foreach": with_torch(sgd, 1, foreach=True, **SGD),
}


def with_torchopt(name: str, **options: Any) -> tuple[Any, Update]:
    """An optimizer of TorchOpt."""
    torchopt = pytest.importorskip("torchopt")
    optimizer = getattr(torchopt, name)(**options)

    def update(params: dict[str, Tensor], state: Any, grads: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        updates, state = optimizer.update(grads, state, params=params, inplace=False)
        return torchopt.apply_updates(params, updates, inplace=False), state

    return optimizer.init, update


def pointers(params: dict[str, spmd.DTensor]) -> list[int]:
    """The memory of weights that both axes shard and the plan moves nowhere."""
    kept = (value for name, value in params.items() if name.endswith((".linear1.weight", ".linear2.weight")))
    return [shard.data_ptr() for value in kept for shard in value.shards]


def assert_trains_alike(init: Any, update: Update, fused: str) -> None:
    """Two steps on a mesh and on one device give the same parameters and states.

    Each parameter is updated by the fused operator, which writes to donated shards.
    """
    module: nn.Module = encoder()
    x = torch.randn((4, 6, 16), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    params = {name: value.detach() for name, value in module.named_parameters()}

    def step(params: dict[str, Tensor], state: Any, x: Tensor) -> Any:
        loss = lambda params: functional_call(module, params, (x,)).sin().sum()  # noqa: E731
        return update(params, state, grad(loss)(params))

    specs = {name: STRATEGIES["fsdp_tp"](name, value) for name, value in params.items()}
    jitted = spmd.jit(step, (specs, None, P("data")), (specs, None), mesh=MESH, donate_argnums=(0, 1))
    placed = spmd.distribute(params, specs, MESH)
    expected, found = (params, init(params)), (placed, init(placed))
    for _ in range(2):
        expected, before = step(*expected, x), pointers(found[0])
        operations = jitted.plan(*found, x).graph.operations
        assert [fused] * len(params) == [operation.name for operation in operations if operation.op in FUSED]
        found = jitted(*found, x)
        assert before == pointers(found[0])
    whole = tree_leaves(spmd.full_tree(found))
    for ours, theirs in zip(whole, tree_leaves(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, check_dtype=False)


@pytest.mark.parametrize("name", sample(TORCH, ["adam, foreach", "adamw, fused", "sgd"]))
def test_torch(name: str) -> None:
    assert_trains_alike(*TORCH[name], f"_fused_{name.split(',')[0]}")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adam", {"lr": RATE, "betas": BETAS}),
        ("adamw", {"lr": RATE, "betas": BETAS, "weight_decay": 0.01}),
        ("sgd", {"lr": RATE, "momentum": 0.9}),
    ],
)
def test_torchopt(name: str, options: Any) -> None:
    assert_trains_alike(*with_torchopt(name, **options), f"_fused_{name}")
