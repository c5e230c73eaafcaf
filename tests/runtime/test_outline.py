"""Programs whose repeated parts are functions compute what they compute without, and hold no more."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import P
from spmd.core.pytree import tree_leaves
from spmd.runtime import outline
from spmd.runtime.codegen import generate
from spmd.runtime.lockstep import generate_lockstep
from spmd.runtime.varying import varying_axes
from spmd.testing.live import peak_bytes

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
LAYERS = 6


def weights() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(6, 10) / 3, torch.randn(10, 6) / 3) for _ in range(LAYERS)]


def layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return x + F.layer_norm(torch.tanh(x @ up) @ down, (6,))


def forward(weights: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in weights:
        x = layer(x, up, down)
    return x


def gradients(weights: Any, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda weights: forward(weights, x).square().sum())(weights)


def checkpointed(weights: Any, x: torch.Tensor) -> Any:
    leaves = [w.detach().requires_grad_() for pair in weights for w in pair]
    for up, down in zip(leaves[::2], leaves[1::2], strict=True):
        x = checkpoint(layer, x, up, down, use_reentrant=False)
    return torch.autograd.grad(x.square().sum(), leaves)


def dropped(weights: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in weights:
        x = F.dropout(layer(x, up, down), 0.2)
    return x


def looped(weights: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in weights:
        x, _ = spmd.scan(lambda x, _, up=up, down=down: (layer(x, up, down), None), x, None, length=3)
    return x


def printed(weights: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in weights:
        spmd.debug.print("g1 = v2; 'r3' \"n4\" {:.3f}", x.sum())
        x = layer(x, up, down)
    return x


FUNCTIONS = [forward, gradients, checkpointed, dropped, looped, printed]


def jitted(function: Callable[..., Any], specs: Any = None) -> Any:
    return spmd.jit(function, ([(P("data", "model"), P("model"))] * LAYERS, P("data")), mesh=MESH)


def run(function: Callable[..., Any], rows: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return tree_leaves(spmd.full_tree(jitted(function)(weights(), torch.randn(rows, 6))))


@pytest.mark.parametrize("rows", [8, 5, 1])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_are_the_same_bits(
    function: Callable[..., Any], rows: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, text = run(function, rows), capsys.readouterr().out
    torch.manual_seed(1)
    on_one = tree_leaves(function(weights(), torch.randn(rows, 6)))
    capsys.readouterr()
    monkeypatch.setattr(outline, "LEAST_SAVED", 8)
    found = run(function, rows)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
    torch.testing.assert_close(found, on_one)
    assert text == capsys.readouterr().out


@pytest.mark.parametrize("function", [each for each in FUNCTIONS if each is not looped])
def test_parts_are_functions_and_hold_no_more(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = jitted(function), (weights(), torch.ones(8, 6))
    program = step.lower(*args)
    varying = varying_axes([program.graph()], MESH, program.input_specs)
    straight, peak = generate(program.graph()).source, peak_bytes(program)
    monkeypatch.setattr(outline, "LEAST_SAVED", 8)
    lockstep = generate_lockstep(program.graph(), MESH, range(4), varying).generated.source
    for source in (generate(program.graph()).source, lockstep):
        assert source.startswith("def part0(held") and len(re.findall(r"part0\(held", source)) >= LAYERS - 1
    assert len(generate(program.graph()).source.splitlines()) < len(straight.splitlines())
    assert peak_bytes(program) == peak == step.plan(*args).memory.peak


def test_nothing_keeps_the_functions_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "LEAST_SAVED", 8)
    generated = generate(jitted(forward).lower(weights(), torch.ones(8, 6)).graph())
    (part,) = map(weakref.ref, generated.function.__defaults__[1:])  # type: ignore[attr-defined]
    assert part() is not None
    del generated
    assert part() is None


def test_an_error_in_a_part_names_the_operator_and_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = F.embedding(x.long(), table).sum(-1) + 1
        return x

    monkeypatch.setattr(outline, "LEAST_SAVED", 4)
    step = spmd.jit(function, (P(), P()), mesh=spmd.make_mesh({"data": 1}, runtime="virtual"))
    table = torch.arange(9.0)[:, None].expand(9, 2)
    assert step(torch.zeros(9, 2), torch.zeros(4)).full_tensor().tolist() == [1.0] * 4
    with pytest.raises(
        IndexError, match=r"\n  In aten.embedding.default on f32.* of this rank, at test_outline.py:\d+"
    ):
        step(table, torch.ones(4))  # 1, 3, 7, 15
