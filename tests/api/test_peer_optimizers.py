"""torch's optimizers on parameters that are DTensors, where torch's DTensor has tests: the parameters of one device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from test_peer_values import GRID, LINE, assert_same, randn
from torch import nn

import spmd
from spmd import P

PAIR = spmd.make_mesh({"z": 2}, runtime="virtual")
MIXED = {"betas": (0.6, 0.66), "eps": 1e-6, "weight_decay": 0.05}
DECAYED = {"lr_decay": 0.02, "weight_decay": 0.05, "initial_accumulator_value": 0.03, "eps": 1e-6}
CENTERED = {"alpha": 0.88, "eps": 1e-6, "weight_decay": 0.05, "momentum": 0.9, "centered": True}
AVERAGED = {"lambd": 0.001, "alpha": 0.85, "t0": 1e5, "weight_decay": 0.05}

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{}, {"weight_decay": 0.05, "amsgrad": True}, {"weight_decay": 0.05, "amsgrad": True, "maximize": True}],
    "AdamW": [{"weight_decay": 0.05}, {**MIXED, "amsgrad": True}, {**MIXED, "amsgrad": True, "maximize": True}],
    "SGD": [
        {},
        {"momentum": 0.06, "dampening": 0.07},
        {"momentum": 0.08, "weight_decay": 0.05, "nesterov": True, "maximize": True},
    ],
    "Adagrad": [{"lr_decay": 0.05}, DECAYED, {**DECAYED, "maximize": True}],
    "RMSprop": [{"alpha": 0.85}, CENTERED, {**CENTERED, "maximize": True}],
    "Adadelta": [{"rho": 0.85}, {"rho": 0.88, "eps": 1e-6, "weight_decay": 0.05, "maximize": True}],
    "NAdam": [{"weight_decay": 0.05}, MIXED, {**MIXED, "decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.05}, MIXED, {**MIXED, "decoupled_weight_decay": True}],
    "Adamax": [{"betas": (0.6, 0.66)}, MIXED, {**MIXED, "maximize": True}],
    "ASGD": [{"lambd": 0.001}, AVERAGED, {**AVERAGED, "maximize": True}],
}
WAYS = [
    *((name, {"foreach": foreach}) for name in OPTIONS for foreach in (False, True)),
    *((name, {"fused": True}) for name in ("Adam", "AdamW")),
]
RATES = [torch.tensor(0.1), torch.tensor([0.1])]


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6)).double()


def place(model: nn.Module, specs: Iterable[tuple[P, spmd.Mesh]]) -> nn.Module:
    """The model with the parameters of its layers on meshes."""
    for layer, (spec, mesh) in zip((model[0], model[2]), specs, strict=True):  # type: ignore[index]
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(spmd.distribute(parameter.detach(), spec, mesh)))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, meshes: Any = None) -> list[torch.Tensor]:
    """The parameters after two steps, with gradients set to zero or to None between them."""
    x = randn(8, 10)
    for step in range(2):
        optimizer.zero_grad(set_to_none=step == 0)
        hidden = x if meshes is None else spmd.distribute(x, P("x"), meshes[0])
        hidden = model[0](hidden).relu()  # type: ignore[index]
        if meshes is None or meshes[0] is meshes[1]:
            model[2](hidden).sum().backward()  # type: ignore[index]
        else:  # one of the replicas on the other mesh carries the gradient
            whole = hidden.full_tensor()  # type: ignore[union-attr]
            moved = spmd.DTensor.from_local([whole, whole.detach()], meshes[1], P())
            model[2](moved).sum().backward()  # type: ignore[index]
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def make(name: str, model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    rate = options.get("lr", 0.1)
    rate = rate.clone() if isinstance(rate, torch.Tensor) else rate
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), **{**options, "lr": rate})
    return optimizer


def assert_trains_alike(name: str, options: dict[str, Any]) -> None:
    plain, sharded = perceptron(), place(perceptron(), [(P("x"), LINE)] * 2)
    specs = [parameter.spec for parameter in sharded.parameters()]
    expected = train(plain, make(name, plain, options))
    assert_same(train(sharded, make(name, sharded, options), meshes=(LINE, LINE)), expected)
    assert specs == [parameter.spec for parameter in sharded.parameters()]


@pytest.mark.parametrize(("name", "way"), WAYS, ids=lambda value: value if isinstance(value, str) else str(value))
def test_parameters_are_those_of_one_device(name: str, way: dict[str, Any]) -> None:
    for options in OPTIONS[name]:
        assert_trains_alike(name, {**options, **way})


@pytest.mark.parametrize("rate", RATES, ids=repr)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_learning_rates_that_are_tensors(name: str, rate: torch.Tensor) -> None:
    for options in ({}, MIXED, {**MIXED, "maximize": True}):
        assert_trains_alike(name, {**options, "fused": True, "lr": rate})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {"amsgrad": True, "lr": RATES[0]}),
        ("AdamW", {"amsgrad": True, "lr": RATES[0]}),
        ("SGD", {}),
        ("Adagrad", {}),
    ],
    ids=["adam", "adamw", "sgd", "adagrad"],
)
def test_fused_operators_without_shapes(name: str, options: dict[str, Any]) -> None:
    assert_trains_alike(name, {**options, "fused": True})


def assert_layers_train_alike(specs: Iterable[tuple[P, spmd.Mesh]], way: dict[str, Any]) -> None:
    options, specs = {**MIXED, "amsgrad": True, **way}, list(specs)
    plain, sharded = perceptron(), place(perceptron(), specs)
    expected = train(plain, make("AdamW", plain, options))
    found = train(sharded, make("AdamW", sharded, options), meshes=[mesh for _, mesh in specs])
    assert_same(found, expected)


@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_layers_of_several_specs(way: dict[str, Any]) -> None:
    assert_layers_train_alike([(P("x"), GRID), (P(("y", "x")), GRID)], way)


@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_layers_on_two_meshes(way: dict[str, Any]) -> None:
    assert_layers_train_alike([(P("x"), LINE), (P("z"), PAIR)], way)
