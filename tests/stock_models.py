"""Stock modules of torch.nn, the ways to shard their parameters, and a few steps of training them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from spmd import Mesh, P, distribute

Rule: TypeAlias = Callable[[str, torch.Tensor], P]
"""From a parameter's path and its tensor to its spec, on a mesh with axes "data" and "model"."""


class ResNet(nn.Module):
    """A stem, a residual block with batch norm, and one that halves the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.same, self.same_norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.down, self.skip = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Conv2d(8, 16, 1, stride=2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The class scores of images [batch, 3, height, width]."""
        x = F.relu(self.norm(self.stem(x)))
        x = x + F.relu(self.same_norm(self.same(x)))
        x = F.relu(self.down(x) + self.skip(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


def encoder() -> nn.Module:
    """A transformer encoder of two layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def resnet() -> nn.Module:
    """A small ResNet."""
    torch.manual_seed(0)
    return ResNet().double()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "encoder": (encoder, (4, 6, 16)),
    "resnet": (resnet, (4, 3, 8, 8)),
}
"""Each model, and the shape of a batch."""


def _tensor_parallel(path: str, parameter: torch.Tensor) -> P:
    if path.endswith(("out_proj.weight", "linear2.weight")):
        return P(None, "model")
    return P("model") if any(part in path for part in ("in_proj", "linear1", "stem", "norm.", "same")) else P()


def _both(path: str, parameter: torch.Tensor) -> P:
    dims = [*_tensor_parallel(path, parameter).dims]
    dims += [()] * (parameter.ndim - len(dims))
    free = next((dim for dim, axes in enumerate(dims) if not axes), 0)
    dims[free] = (*dims[free], "data")
    return P(*dims)


STRATEGIES: dict[str, Rule] = {
    "dp": lambda path, parameter: P(),
    "fsdp": lambda path, parameter: P("data"),
    "tp": _tensor_parallel,
    "fsdp_tp": _both,
}


def place(module: nn.Module, rule: Rule, mesh: Mesh) -> nn.Module:
    """The module with DTensors for parameters, and for buffers, which are replicated.

    "data" and "model" stand for the first and the last axis of the mesh.
    """
    axes = {"data": mesh.names[0], "model": mesh.names[-1]}
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        owner, _, name = path.rpartition(".")
        is_parameter = isinstance(tensor, nn.Parameter)
        spec = rule(path, tensor) if is_parameter else P()
        named = P(*(tuple(axes[axis] for axis in dim) for dim in spec.dims))
        placed = distribute(tensor.detach().clone(), named, mesh)
        setattr(module.get_submodule(owner), name, nn.Parameter(placed) if is_parameter else placed)
    return module


def train(module: nn.Module, x: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    """Train by torch.optim.AdamW; returns the losses, the parameters and the buffers."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = module(x).sin().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in module.parameters()), *module.buffers()]


def assert_trains_alike(model: str, strategy: str, mesh: Mesh) -> None:
    """Check that a model with sharded parameters trains as one device does, and keeps its specs."""
    make, shape = MODELS[model]
    x: Any = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sharded = place(make(), STRATEGIES[strategy], mesh)
    specs = [parameter.spec for parameter in sharded.parameters()]
    found, expected = train(sharded, distribute(x, P(mesh.names[0]), mesh)), train(make(), x)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.full_tensor(), wanted, rtol=1e-7, atol=1e-9)
    assert specs == [parameter.spec for parameter in sharded.parameters()]
