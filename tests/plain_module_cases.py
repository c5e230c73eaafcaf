"""Training loops of plain modules and stock optimizers round a jitted loss, each compared with one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spmd import DivergenceError, Mesh, P, fsdp_specs, jit, process_index

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
Parameters = Iterable[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.05, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
}


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


class Tied(nn.Module):
    """An embedding whose table is the last layer's weight, and a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.last = nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 7, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.embed(x)).tanh())  # type: ignore[no-any-return]


class Lora(nn.Module):
    """A frozen layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def _batch(seed: int, size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, n, dtype=torch.float64, generator=generator) for n in (4, 3))  # type: ignore[return-value]


def _check(module: nn.Module, alone: nn.Module) -> None:
    """Parameters and gradients are plain, equal those of one device, and no two share memory."""
    for (name, one), other in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert type(one) is nn.Parameter and (one.grad is None or type(one.grad) is torch.Tensor), name
        torch.testing.assert_close([one, one.grad], [other, other.grad])
    memory = [x.untyped_storage().data_ptr() for p in module.parameters() for x in (p, p.grad) if x is not None]
    assert len(memory) == len(set(memory))


def _train(
    loss: Loss, alone: nn.Module, make: Callable[[Parameters], torch.optim.Optimizer], step: Callable[..., Any]
) -> None:
    """Take steps with a jitted loss, and the same on one device."""
    module = copy.deepcopy(alone)
    sides: list[tuple[nn.Module, Any, Any]] = []
    for side, f in ((module, loss), (alone, loss.__wrapped__)):  # type: ignore[attr-defined]
        optimizer = make(p for p in side.parameters() if p.requires_grad)
        sides.append((side, f, optimizer))
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for _, _, optimizer in sides]
    for seed in range(4):
        found, expected = (step(f, side, optimizer, seed) for side, f, optimizer in sides)
        torch.testing.assert_close(found, expected)
        _check(module, alone)
        for scheduler in schedulers:
            scheduler.step()


def _number(value: torch.Tensor) -> float:
    return value.detach().item()


def _plain_step(f: Loss, module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    optimizer.zero_grad()
    loss = f(module, *_batch(seed))
    loss.backward()
    optimizer.step()
    return _number(loss)


def _accumulating_step(f: Loss, module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    total = 0.0
    for part in range(3):
        loss = f(module, *_batch(10 * seed + part)) / 3
        loss.backward()
        total += _number(loss)
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return total + _number(norm)


def optimizers(name: str, sharded: bool, mesh: Mesh) -> None:
    """A stock optimizer; parameters are replicated, or sharded by in_specs."""
    alone = _network()
    specs = fsdp_specs(alone, "x", min_size=0) if sharded else None
    loss = jit(loss_of, (specs, P("x"), P("x")), mesh=mesh)
    _train(loss, alone, OPTIMIZERS[name], _plain_step)


def accumulated_and_clipped(mesh: Mesh) -> None:
    """Gradients of several batches, clipped by their norm."""
    _train(jit(loss_of, (None, P("x"), P("x")), mesh=mesh), _network(), OPTIMIZERS["adamw"], _accumulating_step)


def adapters(mesh: Mesh) -> None:
    """Some parameters are frozen."""
    alone = _network()
    alone[0], alone[2] = Lora(alone[0], 2), Lora(alone[2], 2)  # type: ignore[arg-type]
    _train(jit(loss_of, (None, P("x"), P("x")), mesh=mesh), alone, OPTIMIZERS["adamw"], _plain_step)


def tied(mesh: Mesh) -> None:
    """A tied parameter has one gradient."""
    torch.manual_seed(0)
    tokens = torch.arange(10).reshape(5, 2) % 7

    def step(f: Any, module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
        optimizer.zero_grad()
        loss = f(module, tokens + 0, (tokens + seed) % 7)
        loss.backward()
        optimizer.step()
        return _number(loss)

    def of_tokens(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    _train(jit(of_tokens, (None, P("x"), P("x")), mesh=mesh), Tied().double(), OPTIMIZERS["foreach"], step)


def the_module_is_the_function(mesh: Mesh) -> None:
    """`jit(model)`, whose result goes on to a loss of DTensors; and one parameter is used outside, too."""
    alone = _network()
    module = copy.deepcopy(alone)
    forward = jit(module, {"input": P("x")}, mesh=mesh)
    for seed in range(2):
        x, _ = _batch(seed)
        (forward(x).square().mean() * 2).backward()
        (alone(x).square().mean() * 2).backward()
        for side in (module, alone):
            (side[2].bias.square().sum() * 0.1).backward()
        _check(module, alone)


def own_memory(mesh: Mesh) -> None:
    """Gradients that are one value of the program, or the cotangent itself, have memory of their own."""
    for fn in (lambda a, b: (a + b).sum(), lambda a, b: a + b, lambda a, b: (a, b * 2)):
        a, b = (nn.Parameter(torch.ones(3)) for _ in range(2))
        f = jit(fn, mesh=mesh)
        results = f(a, b) if isinstance(f(a, b), tuple) else (f(a, b),)
        cotangents = [torch.ones_like(x) for x in results]
        torch.autograd.backward(results, cotangents)
        assert a.grad is not None and b.grad is not None
        before, others = b.grad.clone(), [x.full_tensor() for x in cotangents]
        a.grad.mul_(5)
        torch.testing.assert_close([a, b, b.grad], [torch.ones(3), torch.ones(3), before])
        torch.testing.assert_close([x.full_tensor() for x in cotangents], others)


def second_order(mesh: Mesh) -> None:
    """A gradient penalty; the third derivative, too."""
    generator = torch.Generator().manual_seed(0)
    w, b, x = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((4, 3), (3,), (5, 4)))
    w, b = nn.Parameter(w), nn.Parameter(b)

    def of(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w + b) + b).square().sum()

    def derivatives(f: Any) -> list[torch.Tensor]:
        first = torch.autograd.grad(f(w, b, x), (w, b), create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), (w, b), create_graph=True)
        third = torch.autograd.grad(sum(g.sin().sum() for g in second), (w, b))
        return [*first, *second, *third]

    for specs in (None, (None, None, P("x")), (P("x"), P("x"), P("x")), (P(None, "x"), P("x"), P())):
        torch.testing.assert_close(derivatives(jit(of, specs, mesh=mesh)), derivatives(of))


def parameters_of_each_rank(mesh: Mesh) -> str:
    """The error where ranks hold other plain parameters."""
    torch.manual_seed(process_index())
    module, f = nn.Linear(4, 3), jit(loss_of, (None, P("x"), P("x")), mesh=mesh)
    try:
        f(module, torch.ones(4, 4), torch.ones(4, 3)).backward()
    except DivergenceError as error:
        return str(error)
    return "none"
