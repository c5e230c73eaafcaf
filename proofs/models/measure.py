"""Runs one model under one strategy on virtual ranks, beside one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.utils import _pytree as torch_pytree

import spmd
from proofs.models.cases import Inputs, Model
from spmd import Mesh, P
from spmd.core.pytree import tree_leaves

LIMIT = 5.0
"""The most seconds of processor time that a plan may take."""

TOLERANCE = 1e-6
"""The difference from one device that a case must stay below: models compute norms and softmax in float32."""

STRATEGIES = ("data", "fully sharded", "tensor")


@attrs.frozen
class Case:
    """One model, one way to run it.

    Args:
        model: the model.
        strategy: one of `STRATEGIES`.
        training: whether it is a step of training, with gradients; else a forward pass.
        masked: whether masks are given.
    """

    model: Model
    strategy: str
    training: bool
    masked: bool


@attrs.frozen
class Found:
    """What a case has shown.

    Args:
        case: the case.
        difference: the largest difference from one device, relative to the largest value of a tensor, or to what
            decides it (see `_scale`).
        seconds: seconds of processor time for tracing and planning.
        error: the error that it ended in; empty if it ran.
    """

    case: Case
    difference: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @property
    def passes(self) -> bool:
        """Whether the numbers are those of one device, and the plan was made in time."""
        return not self.error and self.difference < TOLERANCE and self.seconds <= LIMIT


def measure(case: Case) -> Found:
    """Run a case."""
    try:
        return _measure(case)
    except Exception as error:  # of many types: the page says what
        return Found(case, error=f"{type(error).__name__}: {error}".partition("\n")[0])


def _measure(case: Case) -> Found:
    torch.manual_seed(0)
    module = case.model.make().double().train(case.training)
    inputs = case.model.inputs() | (case.model.masks() if case.masked else {})
    inputs |= case.model.training() if case.training else {}
    params = {name: value.detach() for name, value in module.named_parameters()}
    buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
    step = training_step(module, case.model.backward) if case.training else _forward(module)
    changed = {name: value * noise(value) for name, value in params.items()}
    expected, noisy = (_results(case, step, held, buffers, inputs) for held in (params, changed))
    mesh, specs = sharded(case.strategy, module, params, inputs)
    before = time.process_time()
    jitted = spmd.jit(step, (specs, P(), P("data")), mesh=mesh)
    jitted.plan(params, buffers, inputs)
    seconds = time.process_time() - before
    found = _results(case, jitted, params, buffers, inputs)
    return Found(case, max(map(difference, found, expected, noisy)), seconds)


def _results(
    case: Case, step: Callable[..., Any], params: Inputs, buffers: Inputs, inputs: Inputs
) -> list[torch.Tensor]:
    """What a step returns; of training, the loss and the changes of the parameters."""
    torch.manual_seed(1)
    results = [leaf.detach().clone() for leaf in spmd.full_tree(step(params, buffers, inputs))]
    if case.training:
        results[1:] = [new - old for new, old in zip(results[1:], params.values(), strict=True)]
    return results


NOISE = 2.0**-23
"""The rounding of float32, in which models compute norms and softmax even where parameters are float64."""


def noise(value: torch.Tensor) -> torch.Tensor:
    """Factors by which parameters are changed, to see how much one device's results depend on rounding."""
    return 1 + NOISE * torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(2))


def difference(found: torch.Tensor, expected: torch.Tensor, noisy: torch.Tensor) -> float:
    """The largest difference of a tensor from one device; see `Found`."""
    if not expected.numel():
        return 0.0
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    noisy = torch.where(noisy.isfinite(), noisy, expected)
    expected, found, noisy = (torch.where(finite, x, 0.0) for x in (expected, found, noisy))
    return float((found - expected).abs().max() / _scale(expected, noisy))


def _scale(expected: torch.Tensor, noisy: torch.Tensor) -> torch.Tensor:
    """What a difference is relative to: the largest value, or, if that is less, what rounding leaves of larger ones.

    The gradient of a key's bias is zero, and on one device it is the rounding of terms that cancel: their size is the
    change that rounding makes, over the rounding.
    """
    cancelled = (noisy - expected).abs().max() / NOISE
    return torch.maximum(expected.abs().max(), cancelled).clamp(min=1e-8)


def _call(module: nn.Module, params: Any, buffers: Inputs, inputs: Inputs) -> Any:
    held = {name: value.clone() for name, value in buffers.items()}  # modules write to them
    return functional_call(module, {**params, **held}, (), inputs)


def _floats(output: Any) -> list[torch.Tensor]:
    leaves = torch_pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a model's output: its own, or that of a sine of its results."""
    given = getattr(output, "loss", None)
    return given if given is not None else torch.stack([x.sin().mean() for x in _floats(output)]).sum()


def _forward(module: nn.Module) -> Callable[..., list[torch.Tensor]]:
    def forward(params: Inputs, buffers: Inputs, inputs: Inputs) -> list[torch.Tensor]:
        with torch.no_grad():
            return _floats(_call(module, params, buffers, inputs))

    return forward


def training_step(module: nn.Module, backward: bool) -> Callable[..., list[torch.Tensor]]:
    """A step of gradient descent: of parameters, buffers and inputs, the loss and the new parameters."""

    def step(params: Inputs, buffers: Inputs, inputs: Inputs) -> list[torch.Tensor]:
        def loss(params: Inputs) -> torch.Tensor:
            return loss_of(_call(module, params, buffers, inputs))

        gradients, value = (_backward if backward else grad_and_value)(loss)(params)
        return [value, *(params[name] - 0.1 * gradients[name] for name in params)]

    return step


def _backward(loss: Callable[[Inputs], torch.Tensor]) -> Callable[[Inputs], tuple[Inputs, torch.Tensor]]:
    """`grad_and_value` by torch.autograd."""

    def gradients(params: Inputs) -> tuple[Inputs, torch.Tensor]:
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        value = loss(leaves)
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True)), value.detach()

    return gradients


def sharded(strategy: str, module: nn.Module, params: Inputs, inputs: Inputs, ranks: int = 2) -> tuple[Mesh, Any]:
    """The mesh of a strategy, of so many ranks if it has one axis, and the specs of the parameters.

    The third shards parameters as Megatron-LM does where `tensor_parallel_specs` finds that; otherwise along two axes.
    """
    if strategy != "tensor":
        mesh = spmd.make_mesh({"data": ranks}, runtime="virtual")
        return mesh, P() if strategy == "data" else spmd.fsdp_specs(params, "data", min_size=1, mesh=mesh)
    mesh = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
    training = module.training
    try:
        specs = spmd.tensor_parallel_specs(module.eval(), "model", (), inputs, mesh=mesh)
    except spmd.SpmdError:
        specs = {}
    module.train(training)
    if not any(spec.dims for spec in tree_leaves(specs, is_leaf=lambda leaf: isinstance(leaf, P))):
        specs = spmd.fsdp_specs(params, "model", min_size=1, mesh=mesh)
    return mesh, {name: specs.get(name, P()) for name in params}
