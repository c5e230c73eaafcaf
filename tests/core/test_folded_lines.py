"""Texts with repeated lines written once: written out again, they are the same."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import torch

import spmd
from spmd import P
from spmd.core.folded_lines import fold_lines

MESH = spmd.make_mesh({"model": 4}, runtime="abstract")


def unfold(lines: list[str]) -> list[str]:
    """The lines of a folded text, written out."""
    found: list[str] = []
    place = 0
    while place < len(lines):
        head = re.fullmatch(r"( *)for i in (reversed\(range\(.*\)\)|range\(.*\)):", lines[place])
        place += 1
        if head is None or not re.search(r"\{[-+*\di]*\bi\b[-+*\di]*\}|\{\d+\*i", "\n".join(lines[place : place + 80])):
            found.append(lines[place - 1])
            continue
        body = []
        while place < len(lines) and lines[place].startswith(f"{head[1]}    "):
            body.append(lines[place][4:])
            place += 1
        for i in eval(head[2]):
            found += [re.sub(r"\{([-+*\di]+)\}", lambda e, i=i: str(eval(e[1], {"i": i})), line) for line in body]
    return found


def layers(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for w in weights:
        x = x + torch.tanh(x @ w) * 0.5
    return x


def gradient(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return torch.func.grad(lambda weights: layers(x, weights).sum())(weights)


def foreach(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return torch._foreach_add(weights, weights)


@pytest.mark.parametrize("function", [layers, gradient, foreach])
def test_programs_are_written_out_again(function: Callable[..., object]) -> None:
    x, weights = torch.ones(8, 8), [torch.ones(8, 8)] * 70
    step = spmd.jit(function, (P(), P("model")), mesh=MESH)
    lowered = step.lower(x, weights)
    whole = lowered.as_text(fold=False).splitlines()
    folded = str(lowered).splitlines()
    assert unfold(folded) == whole
    assert len(folded) < len(whole) / 4
    assert "    for i in range(70):" in folded
    for text in map(str, (step.plan(x, weights), step.trace(x, weights))):
        assert len(text.splitlines()) < len(whole) / 4


def test_layers_are_counted_as_in_the_longest_names() -> None:
    lines = [
        line
        for n in range(20)
        for line in (
            f"g_{n + 5} = mul(model_layer_{19 - n}_w, g_{n + 4})",
            f"h_{n + 7} = tanh(g_{n + 5}, {3 * n}) # {n}",
        )
    ]
    assert fold_lines(["begin", *lines, "end"]) == [
        "begin",
        "for i in reversed(range(20)):",
        "    g_{24-i} = mul(model_layer_{i}_w, g_{23-i})",
        "    h_{26-i} = tanh(g_{24-i}, {57-3*i}) # {19-i}",
        "end",
    ]


def test_copies_begin_where_one_layer_ends() -> None:
    """Of three lines a layer, the first two of the first layer differ; a copy begins with the first, all the same."""
    lines = [
        line
        for n in range(20)
        for line in (f"a_{n} = f(c_{n - 1})", f"b_{n} = f(a_{n}, w_{n}_x)", f"c_{n} = f(b_{n}, a_{n})")
    ]
    folded = fold_lines(["a_0 = begin()", "b_0 = other(w_0_x)", *lines[2:]])
    assert folded[3:5] == ["for i in range(1, 20):", "    a_{i} = f(c_{i-1})"] and len(folded) == 7


def test_lines_in_a_loop_of_the_program_are_folded_where_they_stand() -> None:
    lines = ["for t in range(3):", *(f"    x_{n + 1} = f(x_{n}, w_{n}_y)" for n in range(40)), "return x_40"]
    assert fold_lines(lines) == [
        "for t in range(3):",
        "    for i in range(40):",
        "        x_{i+1} = f(x_{i}, w_{i}_y)",
        "return x_40",
    ]


def test_small_programs_are_written_out() -> None:
    x = torch.ones(8, 8)
    lowered = spmd.jit(layers, (P(), P("model")), mesh=MESH).lower(x, [x] * 3)
    assert lowered.as_text() == lowered.as_text(fold=False)


@pytest.mark.parametrize("seed", range(60))
def test_random_lines_are_written_out_again(seed: int) -> None:
    draw = random.Random(seed)
    lines: list[str] = []
    for _ in range(draw.randint(1, 5)):
        body = [
            [(draw.choice("abc") + "_", draw.randint(0, 40), draw.choice([0, 0, 1, -1, 2, 7])) for _ in range(3)]
            for _ in range(draw.randint(1, 30))
        ]
        for copy in range(draw.randint(1, 30)):
            broken = draw.random() < 0.1
            for line in body:
                numbers = [f"{name}{abs(first + step * copy + 40 + broken)}" for name, first, step in line]
                lines.append(f"    {numbers[0]} = f({numbers[1]}, {numbers[2]}, 007, 0.5)")
    assert unfold(fold_lines(lines)) == lines
