"""Tensors on the meta device that a function closes over: the error names them as the user's code does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from spmd import P

MESH = spmd.make_mesh({"x": 2}, runtime="virtual")
X = torch.ones(4, 4)


class Rotary(nn.Module):
    """A module that was made under `torch.device("meta")`, of which a tensor was not given values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made = torch.ones(4, device="meta")
        if kind == "buffer":
            self.register_buffer("inv_freq", made, persistent=False)
        else:
            self.inv_freq = nn.Parameter(made) if kind == "parameter" else made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inv_freq


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rotary = Rotary(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rotary(x)  # type: ignore[no-any-return]


REMEDIES = {
    "buffer": "Assign it, .* a checkpoint has no buffers that are registered with persistent=False",
    "parameter": r"Load it \(load_state_dict with assign=True\)",
}


@pytest.mark.parametrize("kind", REMEDIES)
@pytest.mark.parametrize(
    "close_over",
    [
        lambda model: lambda x: model(x),
        lambda model: lambda x: torch.func.functional_call(model, {}, (x,)),
        lambda model: spmd.shard_map(lambda x: model(x), MESH, P("x"), P("x")),
        lambda model: lambda x: torch.func.grad(lambda x: model(x).sum())(x),
    ],
)
def test_closed_over_modules(kind: str, close_over: Callable[[nn.Module], Any]) -> None:
    f = spmd.jit(close_over(Model(kind)), P("x"), mesh=MESH)
    named = rf"{kind.capitalize()} `rotary.inv_freq` f32\[4\] of the closed-over module Model is on meta"
    for stage in (f, f.trace, f.plan, f.lower):
        with pytest.raises(spmd.TraceError, match=rf"{named} and has no values, at test_closed_over.py:\d+ .*"):
            stage(X)
    with pytest.raises(spmd.TraceError, match=rf"{REMEDIES[kind]}.* pass the module as an argument"):
        f(X)


def test_attributes_of_modules() -> None:
    model = Model("attribute")
    for f, args in ((lambda x: model(x), (X,)), (lambda model, x: model(x), (model, X))):
        with pytest.raises(
            spmd.TraceError, match=r"Attribute `rotary.inv_freq` .* of the .*Model .*register it as a bu"
        ):
            spmd.jit(f, mesh=MESH)(*args)  # type: ignore[arg-type]


def test_variables() -> None:
    mask = torch.ones(4, device="meta")
    tensors = {"mask": torch.ones(4, device="meta")}
    with pytest.raises(spmd.TraceError, match=r"Variable `mask` f32\[4\] is on meta .* pass it as an argument"):
        spmd.jit(lambda x: x * mask, P("x"), mesh=MESH)(X)
    with pytest.raises(spmd.TraceError, match=r"A tensor f32\[4\] is on meta"):
        spmd.jit(lambda x: x * tensors["mask"], P("x"), mesh=MESH)(X)


@pytest.mark.parametrize("kind", REMEDIES)
def test_modules_as_arguments(kind: str) -> None:
    """What the message advises: such a module can be planned, and a call names the argument."""
    f = spmd.jit(lambda model, x: model(x), (None, P("x")), mesh=MESH)
    assert "mul" in f.lower(Model(kind), X).as_text()
    with pytest.raises(spmd.ShardingError, match=r"argument 0.rotary.inv_freq f32\[4\] is a meta tensor"):
        f(Model(kind), X)


def test_values_after_the_error() -> None:
    model = Model("buffer")
    f = spmd.jit(lambda x: model(x), P("x"), mesh=MESH)
    with pytest.raises(spmd.TraceError, match="is on meta"):
        f(X)
    model.rotary.inv_freq = torch.arange(4.0)
    assert torch.equal(X * torch.arange(4.0), f(X).full_tensor())
