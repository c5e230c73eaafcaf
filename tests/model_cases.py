"""Modules as arguments, and samples that have lengths, on a mesh with an axis "x", each compared with one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from spmd import DTensor, Mesh, P, distribute, fsdp_specs, jit
from spmd.core.pytree import tree_leaves


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one.full_tensor() if isinstance(one, DTensor) else one, other)


class Network(nn.Module):
    """Two layers, batch norm between them, and a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.last(self.norm(self.first(x)).relu())  # type: ignore[no-any-return]


def _networks(mesh: Mesh) -> tuple[nn.Module, nn.Module]:
    """A module with sharded parameters, and its like on one device."""
    torch.manual_seed(0)
    alone = Network().double()
    sharded, specs = copy.deepcopy(alone), fsdp_specs(alone, "x", min_size=0)
    for name, parameter in alone.named_parameters():
        path, _, leaf = name.rpartition(".")
        value = distribute(parameter.detach(), specs[name], mesh)
        setattr(sharded.get_submodule(path), leaf, nn.Parameter(value))
    return sharded, alone


def modules_as_arguments(mesh: Mesh) -> None:
    """Training by a stock optimizer, with gradients from outside; buffers are assigned after each call."""
    sharded, alone = _networks(mesh)
    loss = jit(lambda module, x: module(x).sin().sum(), (None, P("x")), mesh=mesh)
    assert any(not parameter.spec.is_replicated for parameter in sharded.parameters())
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (sharded, alone)]
    for seed in range(3):
        x = normal(5, 4, seed=seed)
        found, expected = loss(sharded, x), alone(x).sin().sum()
        assert_equal(found, expected)
        found.backward(), expected.backward()
        for one, other in zip(sharded.parameters(), alone.parameters(), strict=True):
            assert_equal(one.grad, other.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(list(sharded.state_dict().values()), list(alone.state_dict().values()))
    assert 1 == loss.cache_info().currsize


def modules_as_functions(mesh: Mesh) -> None:
    """`jit(model)` in training and in evaluation."""
    sharded, alone = _networks(mesh)
    step = jit(sharded, P("x"), mesh=mesh)
    for is_training in (True, True, False):
        sharded.train(is_training), alone.train(is_training)
        assert_equal(step(normal(5, 4)), alone(normal(5, 4)))
        assert_equal(list(sharded.state_dict().values()), list(alone.state_dict().values()))


def ctc_losses(mesh: Mesh) -> None:
    """Losses and gradients of five samples, of which lengths are static, and of which they are tensors."""
    targets = torch.tensor([[1, 2, 3], [3, 3, 0], [2, 0, 0], [0, 0, 0], [3, 2, 3]])

    def step(x: torch.Tensor, lengths: Any) -> Any:
        loss = lambda x: F.ctc_loss(x.log_softmax(-1), targets, *lengths)  # noqa: E731
        return torch.func.grad_and_value(loss)(x)

    x, lengths = normal(7, 5, 4), ((7, 6, 7, 5, 4), (3, 2, 1, 0, 3))
    tensors = tuple(map(torch.tensor, lengths))
    expected = step(x, tensors)
    assert_equal(jit(step, P(None, "x"), mesh=mesh, static_argnums=[1])(x, lengths), expected)
    assert_equal(jit(step, (P(None, "x"), P("x")), mesh=mesh)(x, tensors), expected)


def packed_sequences(mesh: Mesh) -> None:
    """A recurrent layer on sequences of several lengths: results, last states and gradients."""
    layer = nn.GRU(3, 4, bidirectional=True, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]

    def step(params: Any, x: torch.Tensor, lengths: tuple[int, ...]) -> Any:
        reads = [value.detach().requires_grad_() for value in (*params, x)]
        packed = pack_padded_sequence(reads[-1], lengths, enforce_sorted=False)
        output, last = torch.func.functional_call(layer, dict(zip(names, reads, strict=False)), (packed,))
        padded, _ = pad_packed_sequence(output)
        gradients = torch.autograd.grad(padded.sin().sum() + last.square().sum(), reads)
        return gradients, padded.detach(), last.detach()

    params = [normal(*value.shape, seed=seed) / 2 for seed, value in enumerate(layer.parameters())]
    args = params, normal(6, 5, 3), (2, 6, 1, 3, 3)
    assert_equal(jit(step, (P(), P(None, "x")), mesh=mesh, static_argnums=[2])(*args), step(*args))


CASES: dict[str, Callable[[Mesh], None]] = {
    case.__name__: case for case in (modules_as_arguments, modules_as_functions, ctc_losses, packed_sequences)
}


def run(name: str, mesh: Mesh) -> None:
    """Run a case."""
    CASES[name](mesh)
