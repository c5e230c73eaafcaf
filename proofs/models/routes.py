"""Trains one model by three routes under one layout on virtual ranks, beside torch's loop on one device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn
from torch.func import functional_call, grad_and_value

import spmd
from proofs.models.cases import Inputs, Model
from proofs.models.measure import NOISE, TOLERANCE, difference, loss_of, noise, sharded
from spmd import Mesh, P

STEPS = 3
"""The steps of training: the third loss depends on two updates."""

OPTIONS = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.0}
"""Of AdamW. With an `eps` of the size of gradients an update grows with them, and rounding is not amplified."""

Trained: TypeAlias = tuple[list[torch.Tensor], Inputs]
"""The losses of the steps, and the parameters afterwards."""


@attrs.frozen
class Route:
    """A model, a layout, and how it is trained.

    Args:
        model: the model.
        strategy: one of `LAYOUTS`.
        route: one of `ROUTES`.
    """

    model: Model
    strategy: str
    route: str


@attrs.frozen
class Trial:
    """What a training has shown.

    Args:
        case: the model, the layout and the route.
        losses, parameters: the largest differences from one device, as of `proofs.models.measure.Found`.
        seconds: seconds of processor time, with tracing and planning.
        error: the error that it ended in; empty if it ran.
    """

    case: Route
    losses: float = 0.0
    parameters: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @property
    def passes(self) -> bool:
        """Whether the numbers are those of one device."""
        return not self.error and max(self.losses, self.parameters) < TOLERANCE


LAYOUTS = ("fully sharded", "tensor")


def train(model: Model, strategy: str, routes: tuple[str, ...] = ()) -> list[Trial]:
    """Train a model under a layout by some routes, by default by all."""
    expected, noisy = (_changes(model, outside(*_made(model, by), None, None)) for by in (0.0, NOISE))
    return [_trial(Route(model, strategy, route), expected, noisy) for route in routes or ROUTES]


def _trial(case: Route, expected: list[torch.Tensor], noisy: list[torch.Tensor]) -> Trial:
    module, inputs = _made(case.model)
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    mesh, specs = sharded(case.strategy, module, parameters, inputs, ranks=3)
    before = time.process_time()
    try:
        found = _changes(case.model, ROUTES[case.route](module, inputs, mesh, specs))
    except Exception as error:  # of many types: the page says what
        return Trial(case, error=f"{type(error).__name__}: {error}".partition("\n")[0])
    differences = list(map(difference, found, expected, noisy))
    return Trial(case, max(differences[:STEPS]), max(differences[STEPS:]), time.process_time() - before)


def _made(model: Model, by: float = 0.0) -> tuple[nn.Module, Inputs]:
    """The module in training mode, its parameters changed by so much, and its inputs."""
    torch.manual_seed(0)
    module = model.make().double().train()
    with torch.no_grad():
        for parameter in module.parameters() if by else ():
            parameter.mul_(noise(parameter))
    return module, model.inputs() | model.training()


def _changes(model: Model, trained: Trained) -> list[torch.Tensor]:
    """The losses, and the changes of the parameters."""
    losses, parameters = spmd.full_tree(trained)
    before = dict(_made(model)[0].named_parameters())
    return [*losses, *((value - before[name]).detach() for name, value in parameters.items())]


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def functional(module: nn.Module, inputs: Inputs, mesh: Mesh, specs: Any) -> Trained:
    """By torch.func and a functional optimizer, in one jitted step."""
    optimizer = spmd.optim.adamw(**OPTIONS)
    names = _trained(module)
    frozen = {
        name: x.detach() for name, x in (*module.named_parameters(), *module.named_buffers()) if name not in names
    }

    @spmd.jit(in_specs={"inputs": P("data")}, mesh=mesh)
    def step(params: Inputs, state: Any, frozen: Inputs, inputs: Inputs) -> Any:
        def loss(params: Inputs) -> torch.Tensor:
            others = {name: value.clone() for name, value in frozen.items()}  # modules write to buffers
            return loss_of(functional_call(module, {**params, **others}, (), inputs))

        gradients, value = grad_and_value(loss)(params)
        return *optimizer.step(params, state, gradients), value

    params = spmd.distribute({n: x.detach() for n, x in names.items()}, {name: specs[name] for name in names}, mesh)
    state, losses = optimizer.init(params), []
    for number in range(STEPS):
        torch.manual_seed(number)
        params, state, value = step(params, state, frozen, inputs)
        losses.append(value)
    return losses, params


def backward(module: nn.Module, inputs: Inputs, mesh: Mesh, specs: Any) -> Trained:
    """By `.backward()` inside of a jitted step that takes the module."""
    spmd.distribute_module(module, mesh, specs)
    optimizer, params, losses = spmd.optim.adamw(**OPTIONS), _trained(module), []

    @spmd.jit(in_specs={"inputs": P("data")}, mesh=mesh)
    def step(module: nn.Module, state: Any, inputs: Inputs) -> Any:
        value = loss_of(module(**inputs))
        value.backward()
        held = _trained(module)
        gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in held.items()}
        return *optimizer.step({name: x.detach() for name, x in held.items()}, state, gradients), value.detach()

    with torch.no_grad():
        state = optimizer.init({name: x.detach() for name, x in params.items()})
        for number in range(STEPS):
            torch.manual_seed(number)
            changed, state, value = step(module, state, inputs)
            for name, parameter in params.items():
                parameter.copy_(changed[name])
            losses.append(value)
    return losses, dict(params)


def outside(module: nn.Module, inputs: Inputs, mesh: Mesh | None, specs: Any) -> Trained:
    """By torch's own loop: on a distributed module outside of jit, or, without a mesh, on one device."""
    if mesh is not None:
        spmd.distribute_module(module, mesh, specs)
        inputs = spmd.distribute(inputs, P("data"), mesh)
    optimizer, losses = torch.optim.AdamW(_trained(module).values(), **OPTIONS), []  # type: ignore[arg-type]
    # transformers makes plain tensors, such as positions
    with spmd.implicit_replication() if mesh is not None else contextlib.nullcontext():
        for number in range(STEPS):
            torch.manual_seed(number)
            value = loss_of(module(**inputs))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.detach())
    return losses, dict(_trained(module))


ROUTES: MappingProxyType[str, Callable[[nn.Module, Inputs, Any, Any], Trained]] = MappingProxyType(
    {"torch.func": functional, ".backward() inside": backward, "outside of jit": outside}
)
"""How a model is trained."""
